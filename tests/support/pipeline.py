"""Runs the real pipeline as a user would: `snakemake --config …` in a given folder."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.data import ROOT


def command(*arguments: str, cores: int = 2, **config: object) -> list[str]:
    """Returns the command line of a build."""
    pairs = [f"{key}={value}" for key, value in config.items()]
    snakefile = ["-s", str(ROOT / "Snakefile"), "--cores", str(cores)]
    return [sys.executable, "-m", "snakemake", *snakefile, *arguments, *(["--config", *pairs] if pairs else [])]


def environment() -> dict[str, str]:
    """Returns this process's environment with the interpreter's folder first on the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def snakemake(folder: Path, *arguments: str, cores: int = 2, **config: object) -> subprocess.CompletedProcess[str]:
    """Runs snakemake in `folder` with the checkout's Snakefile; the caller looks at returncode, stdout and stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        command(*arguments, cores=cores, **config),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def build(folder: Path, *arguments: str, cores: int = 2, **config: object) -> Path:
    """Builds an artifact and returns the device's build folder; raises with snakemake's output if it fails."""
    done = snakemake(folder, *arguments, cores=cores, **config)
    if done.returncode:
        raise RuntimeError(f"snakemake ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return target(folder, **config)


def target(folder: Path, **config: object) -> Path:
    """Returns the device's build folder of a build in `folder`."""
    label = f"+{config['label']}" if "label" in config else ""
    name = Path(str(config.get("device", "pixel6"))).stem  # `device` is a file or the name of a shipped profile
    (device,) = folder.glob(f"build/*/{name}{label}/device.json")
    return device.parent
