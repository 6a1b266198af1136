"""What checksums cost: `verify` of a made artifact from the page cache, and CRC-32C as a share of decode's flash time.

    python -m benchmarks.checksums [--layers 6] [--folder DIR]

Prints one JSON object as its last line. Everything is the best of three runs; the digest's and the checksum's own rates
are per second of the processor. On a busy machine compare `verify_cpu_s`, processor seconds of all threads together.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact, small_spec

SAMPLE_BYTES = 64 << 20
NUM_TOKENS = 32


def main() -> None:
    """Builds, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of 75 MB each")
    parser.add_argument("--folder", type=Path, help="where the artifact is made; on the device to be measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        spec = small_spec(num_hidden_layers=arguments.layers, hidden_size=2048, intermediate_size=6144)
        recipe = Recipe(spec=spec, context_length=64, read_buffer_bytes=16 << 20)
        path = build_artifact(Path(folder) / "a", recipe).path
        print(json.dumps(measure(path)))


def measure(path: Path) -> dict[str, float | bool | None]:
    """The figures; rates in GB/s."""
    sample = np.random.default_rng(0).integers(0, 256, SAMPLE_BYTES, dtype=np.uint8)
    _, crc_s = best(lambda: _native.crc32c_pages(sample, 4096))
    _, sha_s = best(lambda: hashlib.sha256(sample.data).digest())
    verify_s, cpu_s = best(lambda: verify_artifact(open_artifact(path)))
    num_bytes = verify_artifact(open_artifact(path))
    with Session(path) as session:
        found = session.generate([1, 2, 3], NUM_TOKENS, ignore_eos=True).metrics
    crc_of_decode_s = found.read_bytes * crc_s / SAMPLE_BYTES
    return {
        "verified_bytes": num_bytes,
        "verify_gb_per_s": round(num_bytes / verify_s / 1e9, 3),
        "verify_cpu_s": round(cpu_s, 3),
        "sha256_gb_per_s": round(SAMPLE_BYTES / sha_s / 1e9, 3),
        "crc32c_gb_per_s": round(SAMPLE_BYTES / crc_s / 1e9, 3),
        "decode_read_bytes": found.read_bytes,
        "decode_flash_s": round(found.flash_s, 4),
        "crc_share_of_flash_time": round(crc_of_decode_s / found.flash_s, 4),
        "direct_io": found.direct_io,
    }


def best(run: Callable[[], object]) -> tuple[float, float]:
    """The least seconds, and the least seconds of the processor, of three runs."""
    runs: list[tuple[float, float]] = []
    for _ in range(3):
        start, cpu = time.perf_counter(), time.process_time()
        run()
        runs.append((time.perf_counter() - start, time.process_time() - cpu))
    return min(wall_s for wall_s, _ in runs), min(cpu_s for _, cpu_s in runs)


if __name__ == "__main__":
    main()
