"""Measures the cost of checksums: `verify` from the page cache, and CRC-32C as a share of decode's flash time.

An artifact is built and read once, so that its files are in the page cache. Each round runs all parts in turn.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, interleaved, main, option, spread
from coldpress.runtime import _native
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact, small_spec

NUM_TOKENS = 32


@dataclass(frozen=True)
class Options:
    layers: int = option(6, smoke=1, full=24, help="layers of the artifact, of 75 MB each")
    sample_bytes: int = option(64 << 20, smoke=4 << 20, help="bytes on which SHA-256 and CRC-32C are timed")
    rounds: int = option(5, smoke=2, help="rounds; each runs all parts in turn")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].verified_bytes": "bytes of the artifact that verify checks",
        "rows[].verify_s": "seconds of one verify, files in the page cache",
        "rows[].verify_gb_per_s": "GB/s of verify: verified_bytes over the median of verify_s",
        "rows[].verify_cpu_s": "processor seconds of all threads in one verify, least of the rounds",
        "rows[].sha256_gb_per_s": "GB/s of SHA-256 on one thread",
        "rows[].crc32c_gb_per_s": "GB/s of CRC-32C on one thread",
        "rows[].decode_read_bytes": "bytes that decoding reads from flash",
        "rows[].decode_flash_s": "seconds that decoding waits for flash",
        "rows[].crc_share_of_flash_time": "seconds of CRC-32C of decode_read_bytes on one thread over decode_flash_s",
        "rows[].direct_io": "whether decoding reads past the page cache (O_DIRECT)",
    }
    is_timing = True
    full_minutes = 3

    def measure(self, cell: Cell) -> Iterator[Row]:
        spec = small_spec(num_hidden_layers=self.options.layers, hidden_size=2048, intermediate_size=6144)
        recipe = Recipe(spec=spec, context_length=64, read_buffer_bytes=16 << 20)
        path = build_artifact(self.folder / "a", recipe).path
        num_bytes, size = verify_artifact(open_artifact(path)), self.options.sample_bytes
        sample = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        cpu_s: list[float] = []

        def verify() -> None:
            start_s = time.process_time()
            verify_artifact(open_artifact(path))
            cpu_s.append(time.process_time() - start_s)

        works = {
            "verify": verify,
            "crc": lambda: _native.crc32c_pages(sample, 4096),
            "sha256": lambda: hashlib.sha256(sample.data).digest(),
        }
        found = {name: spread(samples) for name, samples in interleaved(works, self.options.rounds).items()}
        with Session(path) as session:
            decoded = session.generate([1, 2, 3], NUM_TOKENS, ignore_eos=True).metrics
        crc_of_decode_s = decoded.read_bytes * found["crc"]["median"] / size
        yield {
            "verified_bytes": num_bytes,
            "verify_s": found["verify"],
            "verify_gb_per_s": num_bytes / found["verify"]["median"] / 1e9,
            "verify_cpu_s": min(cpu_s),
            "sha256_gb_per_s": size / found["sha256"]["median"] / 1e9,
            "crc32c_gb_per_s": size / found["crc"]["median"] / 1e9,
            "decode_read_bytes": decoded.read_bytes,
            "decode_flash_s": decoded.flash_s,
            "crc_share_of_flash_time": crc_of_decode_s / decoded.flash_s,
            "direct_io": decoded.direct_io,
        }


if __name__ == "__main__":
    main("checksums")
