"""`python -m coldpress.schemas` checks whether the JSON Schemas match the records; `--fix` writes them."""

import argparse
import sys

from coldpress.schemas import json_schemas


def main(argv: list[str] | None = None) -> int:
    """Checks or writes the files; returns 1 if a file is out of date and was not written."""
    parser = argparse.ArgumentParser(prog="python -m coldpress.schemas", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the files that are out of date")
    arguments = parser.parse_args(argv)
    names = json_schemas.outdated()
    if arguments.fix:
        json_schemas.write()
    for name in names:
        state = "written" if arguments.fix else "out of date; run python -m coldpress.schemas --fix"
        print(f"schemas/json/{name}: {state}")
    return 1 if names and not arguments.fix else 0


if __name__ == "__main__":
    sys.exit(main())
