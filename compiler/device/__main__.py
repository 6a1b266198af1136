"""Device profiles on the command line: a profile's record for a build, this machine measured, fio's figures imported.

`resolve` is what the workflow runs. `measure` and `import-fio` write a YAML profile; `device=<path>.yaml` uses any of
them, and `device=host` takes build/host.yaml where it exists.
"""

import argparse
import sys
from pathlib import Path

import yaml

from coldpress.compiler.device.fio import import_fio, read_report
from coldpress.compiler.device.measure import measure
from coldpress.compiler.io import replacing, save_record
from coldpress.compiler.profiles import device_file, load_device
from coldpress.runtime.quantities import parse_bytes
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError


def _save_profile(profile: DeviceProfile, path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text(
            yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, width=120), encoding="utf-8"
        )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coldpress.compiler.device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    resolve = commands.add_parser("resolve", help="check a profile and write its record")
    resolve.add_argument("device", help="name of a profile, or the path of a YAML file")
    measured = commands.add_parser("measure", help="measure this machine: its DRAM, its cores, the storage of --folder")
    measured.add_argument("--folder", type=Path, help="where artifacts will lie (default: the output's folder)")
    measured.add_argument("--file-size", default="1GiB", help="size of the file that is read (default: 1GiB)")
    imported = commands.add_parser("import-fio", help="take the storage from a report of fio --output-format=json")
    imported.add_argument("report", type=Path)
    imported.add_argument("--base", default="host", help="profile of everything but the storage (default: host)")
    for command in (measured, imported):
        command.add_argument("--name", default="host", help="name of the profile (default: host)")
    for command in (resolve, measured, imported):
        command.add_argument("--output", type=Path, required=True, metavar="FILE")
    return parser


def _execute(arguments: argparse.Namespace) -> None:
    if arguments.command == "resolve":
        save_record(load_device(device_file(arguments.device, Path("build"))), arguments.output)
    elif arguments.command == "measure":
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        folder = arguments.folder or arguments.output.parent
        print(f"measuring the DRAM, and the storage of {folder} with a file of {arguments.file_size}", file=sys.stderr)
        _save_profile(measure(arguments.name, folder, parse_bytes(arguments.file_size)), arguments.output)
    else:
        base = load_device(device_file(arguments.base, Path("build")))
        _save_profile(import_fio(read_report(arguments.report), arguments.name, base), arguments.output)


def main(argv: list[str] | None = None) -> int:
    """Entry point; bad input ends in one sentence and exit code 2."""
    try:
        _execute(_build_parser().parse_args(argv))
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
