"""The kernels of aarch64 on other machines: compiled for it and run by an emulator, held against the portable ones.

Needs the Debian packages g++-aarch64-linux-gnu and qemu-user; where those are not installed, the test is left out.
"""

import shutil
import subprocess

import pytest

from tests.support.data import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = ROOT / "runtime" / "native" / "src"
PRODUCTS = {"dot", "axpy", "dot_rounded_8", "dot_rounded_16", "multiply"}
KERNELS = PRODUCTS | {"decode", "decode_panels", "exp_sum", "activate"}


@pytest.mark.skipif(not shutil.which(COMPILER) or not shutil.which(EMULATOR), reason=f"no {COMPILER} or {EMULATOR}")
@pytest.mark.parametrize("instructions", ["armv8-a", "armv8.2-a+dotprod"])
def test_neon_computes_what_the_portable_kernels_compute(tmp_path, instructions):
    """Up to the rounding of float32 sums in another order: 1e-6 of the sum of magnitudes."""
    sources = [ROOT / "tests" / "runtime" / "kernels_check.cpp", SOURCES / "kernels_neon.cpp"]
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static"]
    command = [COMPILER, *flags, f"-march={instructions}", f"-I{SOURCES}", *sources, SOURCES / "kernels_portable.cpp"]
    subprocess.run([*command, "-o", tmp_path / "check"], check=True)
    done = subprocess.run([EMULATOR, tmp_path / "check"], check=True, capture_output=True, text=True)
    found = [line.split() for line in done.stdout.splitlines()]
    assert {kernel for kernel, _, _ in found} == KERNELS
    assert [line for line in found if not float(line[2]) < 1] == []
    assert any(float(difference) > 0 for kernel, _, difference in found if kernel == "dot"), "other instructions"
