"""Device profiles on the command line: measures this machine, imports a report of fio, shows and compares profiles.

The workflow runs `resolve`. `measure` and `import-fio` write a profile, in YAML, or in JSON where the file's name ends
in .json; `device=<path>.yaml` uses it, and `device=host` takes build/host.yaml where it exists. `fio-jobs` prints the
job file whose report `import-fio` takes; coldpress/compiler/device/README.md has the steps for a phone.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from coldpress.compiler.device.fio import JOBS, Stated, import_fio, read_report
from coldpress.compiler.device.measure import fit_sentence, measure
from coldpress.compiler.io import replacing, save_record
from coldpress.runtime.profiles.devices import DEVICE_HELP, read_device
from coldpress.runtime.quantities import parse_bytes
from coldpress.schemas.device import MAX_NAME_CHARS, NAME_PATTERN, DeviceProfile
from coldpress.schemas.errors import ColdpressError, clipped


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_name(name: str) -> str:
    if re.fullmatch(NAME_PATTERN, name) is None or len(name) > MAX_NAME_CHARS:
        raise ColdpressError(
            f"--name {clipped(name)!r} is no name of a device; use small letters and digits, with single hyphens "
            f"between them, at most {MAX_NAME_CHARS} characters"
        )
    return name


def _load(name_or_path: str) -> DeviceProfile:
    from coldpress.compiler.profiles import device_file  # needs PyYAML

    return read_device(device_file(name_or_path, Path("build")))


def _check_output(path: Path) -> None:
    """Refuses YAML output without PyYAML, before anything is measured."""
    if path.suffix != ".json":
        try:
            import yaml  # noqa: F401
        except ModuleNotFoundError as error:
            raise ColdpressError(
                f"--output {path}: a profile in YAML needs PyYAML, which is not installed; pip install "
                "PyYAML, or give a name that ends in .json"
            ) from error


def _save_profile(profile: DeviceProfile, path: Path) -> None:
    if path.suffix == ".json":
        save_record(profile, path)
        return
    import yaml

    text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, width=120)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the commands of `coldpress device`."""
    parser.description = __doc__
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    resolve = commands.add_parser("resolve", help="check a profile and write its record")
    resolve.add_argument("device", help=DEVICE_HELP)
    measured = commands.add_parser(
        "measure", help="measure this machine: DRAM, cores, kernels, the storage of --folder"
    )
    measured.add_argument("--folder", type=Path, help="where artifacts will lie (default: the output's folder)")
    measured.add_argument("--file-size", default="1GiB", help="size of the file that is read (default: 1GiB)")
    imported = commands.add_parser("import-fio", help="take the storage from a report of fio --output-format=json")
    imported.add_argument("report", type=Path)
    imported.add_argument("--base", help="the profile whose DRAM, cores and accelerator are assumed where not given")
    imported.add_argument("--dram-bytes", help="DRAM of the device, such as 12GB")
    imported.add_argument("--dram-bytes-per-s", type=float, help="its DRAM bandwidth, such as 6.8e10")
    imported.add_argument("--num-cores", type=int, help="its cores that compute")
    imported.add_argument("--name", help="name of the profile")
    measured.add_argument("--name", default="host", help="name of the profile (default: host)")
    for command in (resolve, measured, imported):
        command.add_argument("--output", type=Path, required=True, metavar="FILE")
    commands.add_parser("fio-jobs", help="print the job file of fio whose report import-fio takes")
    shown = commands.add_parser("show", help="print a profile's figures, its points, the law and its errors")
    shown.add_argument("device", help=DEVICE_HELP)
    shown.add_argument("--chart", type=Path, metavar="FILE.svg", help="also draw the points and the law")
    compared = commands.add_parser("compare", help="print the figures of two profiles side by side")
    compared.add_argument("device", nargs=2, help=DEVICE_HELP)
    for command in (shown, compared):
        command.add_argument("--json", action="store_true", help="print the profile, or both, as one JSON object")


def run(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        ColdpressError: if a profile, a report or a flag is refused.
    """
    if arguments.command == "resolve":
        save_record(_load(arguments.device), arguments.output)
        return
    if arguments.command == "fio-jobs":
        print(JOBS.read_text(encoding="utf-8"), end="")
        return
    if arguments.command in ("show", "compare"):
        _show(arguments)
        return
    _check_output(arguments.output)
    if arguments.command == "measure":
        _measure(arguments)
    else:
        _import(arguments)


def _measure(arguments: argparse.Namespace) -> None:
    name = _check_name(arguments.name)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder or arguments.output.parent
    _tell(f"measuring DRAM, kernels, and the storage of {folder} with a file of {arguments.file_size}; about a minute")
    _save_profile(measure(name, folder, parse_bytes(arguments.file_size), _tell), arguments.output)


def _import(arguments: argparse.Namespace) -> None:
    if arguments.base is None or arguments.name is None:
        raise ColdpressError(
            "fio measures the storage alone; give --name for the new profile and --base, the profile that its DRAM, "
            "cores and accelerator are assumed from, such as --base oneplus12"
        )
    base = _load(arguments.base)
    dram_bytes = parse_bytes(arguments.dram_bytes) if arguments.dram_bytes is not None else None
    stated = Stated(dram_bytes, arguments.dram_bytes_per_s, arguments.num_cores)
    found = import_fio(read_report(arguments.report), _check_name(arguments.name), base, stated)
    _save_profile(found, arguments.output)
    sizes = sorted({point.read_bytes for point in found.flash.read_curve.value})
    if len(sizes) == 1:
        _tell(
            f"warning: the report has one read size, {sizes[0]} bytes, whose bandwidth now counts as the storage's "
            "peak; measure larger reads, too, up to --bs=1m"
        )
    _tell(fit_sentence(found.flash))
    missing = [name for name, value in vars(stated).items() if value is None]
    if base.accelerator is not None:
        missing.append("accelerator")
    if missing:
        _tell(
            f"warning: {', '.join(missing)} are assumed as in the profile {base.name}, not the device's own; state "
            "them with --dram-bytes, --dram-bytes-per-s and --num-cores, or edit the profile"
        )


def _show(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from coldpress.compiler.device.shown import compare, plot, show

    console = Console(highlight=False)
    if arguments.command == "compare":
        one, other = map(_load, arguments.device)
        if arguments.json:
            print(json.dumps([profile.model_dump(mode="json") for profile in (one, other)]))
        else:
            compare(one, other, console)
        return
    profile = _load(arguments.device)
    if arguments.chart is not None:
        plot(profile, arguments.chart)
    if arguments.json:
        print(json.dumps(profile.model_dump(mode="json")))
    else:
        show(profile, console)
