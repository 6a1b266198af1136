"""Device profiles on the command line: measures this machine, imports a report of fio, shows and compares profiles.

The workflow runs `resolve`. `measure` and `import-fio` write a profile, in YAML, or in JSON where the file's name ends
in .json; `device=<path>.yaml` uses it, and `device=host` takes build/host.yaml where it exists. `fio-jobs` prints the
job file whose report `import-fio` takes; coldpress/compiler/device/README.md has the steps for a phone.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldpress.compiler.device.fio import JOBS, Stated, import_fio, read_report
from coldpress.compiler.device.measure import fit_sentence, measure
from coldpress.compiler.io import replacing, save_record
from coldpress.runtime.cli.declaration import FILE, Commands, argument, command, option, switch
from coldpress.runtime.device_profiles.devices import DEVICE_HELP, read_device
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


_OUTPUT: dict[str, Any] = {"required": True, "type": FILE, "metavar": "FILE"}
_JSON = "print the profile, or both, as one JSON object"


@dataclass(frozen=True, kw_only=True)
class Resolve:
    device: str = argument(DEVICE_HELP)
    output: Path = option("the record", **_OUTPUT)


@dataclass(frozen=True, kw_only=True)
class Measure:
    folder: Path | None = option("where artifacts will lie (default: the output's folder)", type=FILE, metavar="FOLDER")
    file_size: str = option("size of the file that is read (default: 1GiB)", default="1GiB", metavar="BYTES")
    name: str = option("name of the profile (default: host)", default="host", metavar="NAME")
    output: Path = option("the profile", **_OUTPUT)


@dataclass(frozen=True, kw_only=True)
class ImportFio:
    report: Path = argument("what fio printed", type=FILE)
    base: str | None = option(
        "the profile whose DRAM, cores and accelerator are assumed where not given", metavar="DEVICE"
    )
    dram_bytes: str | None = option("DRAM of the device, such as 12GB", metavar="BYTES")
    dram_bytes_per_s: str | None = option("its DRAM bandwidth, such as 68GB or 6.8e10", metavar="BYTES")
    num_cores: int | None = option("its cores that compute", type=int, metavar="N")
    name: str | None = option("name of the profile", metavar="NAME")
    output: Path = option("the profile", **_OUTPUT)


@dataclass(frozen=True, kw_only=True)
class FioJobs:
    """`coldpress device fio-jobs` has no flags."""


@dataclass(frozen=True, kw_only=True)
class Show:
    device: str = argument(DEVICE_HELP)
    chart: Path | None = option("also draw the points and the law", type=FILE, metavar="FILE.svg")
    json: bool = switch(_JSON)


@dataclass(frozen=True, kw_only=True)
class Compare:
    a: str = argument(DEVICE_HELP)
    b: str = argument(DEVICE_HELP)
    json: bool = switch(_JSON)


def _resolve(flags: Resolve) -> None:
    save_record(_load(flags.device), flags.output)


def _print_jobs(flags: FioJobs) -> None:
    print(JOBS.read_text(encoding="utf-8"), end="")


def _measure(flags: Measure) -> None:
    _check_output(flags.output)
    name = _check_name(flags.name)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    folder = flags.folder or flags.output.parent
    _tell(f"measuring DRAM, kernels, and the storage of {folder} with a file of {flags.file_size}; about a minute")
    _save_profile(measure(name, folder, parse_bytes(flags.file_size), _tell), flags.output)


def _rate(text: str | None) -> float | None:
    """Returns bytes per second of a number or an amount of memory, such as `68GB` or `68GB/s`."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return float(parse_bytes(text.removesuffix("/s")))


def _import(flags: ImportFio) -> None:
    _check_output(flags.output)
    if flags.base is None or flags.name is None:
        raise ColdpressError(
            "fio measures the storage alone; give --name for the new profile and --base, the profile that its DRAM, "
            "cores and accelerator are assumed from, such as --base oneplus12"
        )
    base = _load(flags.base)
    dram_bytes = parse_bytes(flags.dram_bytes) if flags.dram_bytes is not None else None
    stated = Stated(dram_bytes, _rate(flags.dram_bytes_per_s), flags.num_cores)
    found = import_fio(read_report(flags.report), _check_name(flags.name), base, stated)
    if flags.output.exists():
        _tell(f"note: {flags.output} is replaced, with all figures that it had")
    _save_profile(found, flags.output)
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


def _show(flags: Show) -> None:
    from rich.console import Console

    from coldpress.compiler.device.shown import plot, show

    profile = _load(flags.device)
    if flags.chart is not None:
        plot(profile, flags.chart)
    if flags.json:
        print(json.dumps(profile.model_dump(mode="json")))
    else:
        show(profile, Console(highlight=False))


def _compare(flags: Compare) -> None:
    from rich.console import Console

    from coldpress.compiler.device.shown import compare

    one, other = _load(flags.a), _load(flags.b)
    if flags.json:
        print(json.dumps([profile.model_dump(mode="json") for profile in (one, other)]))
    else:
        compare(one, other, Console(highlight=False))


COMMAND = Commands(
    name="device",
    help=__doc__,
    no_args_is_help=False,
    commands=[
        command(Resolve, _resolve, name="resolve", help="check a profile and write its record"),
        command(
            Measure,
            _measure,
            name="measure",
            help="measure this machine: DRAM, cores, kernels, the storage of --folder",
        ),
        command(
            ImportFio, _import, name="import-fio", help="take the storage from a report of fio --output-format=json"
        ),
        command(FioJobs, _print_jobs, name="fio-jobs", help="print the job file of fio whose report import-fio takes"),
        command(Show, _show, name="show", help="print a profile's figures, its points, the law and its errors"),
        command(Compare, _compare, name="compare", help="print the figures of two profiles side by side"),
    ],
)
