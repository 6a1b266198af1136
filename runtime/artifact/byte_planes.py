"""Compresses arrays of 16-bit numbers: all low bytes, then all high bytes, by zstandard.

Signs and exponents, which are in the high bytes, are far from random; beside the bits of mantissas zstandard finds less
in them (docs/experiments/builds.md). A version of zstandard gives the same bytes on every machine.
"""

import zstandard

LEVEL = 3
"""Higher ones take up to a hundred times as long, and save another 5 % at most."""


def pack(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(data[0::2] + data[1::2])


def unpack(packed: bytes, max_bytes: int | None = None) -> bytes:
    """Returns what `pack` was given. Raises `ValueError` if this is not of `pack`, or was more than `max_bytes`."""
    try:
        size = zstandard.frame_content_size(packed)  # `pack` always states it; -1 where it is not stated
        if size < 0:
            raise ValueError("it does not state its size before compression")
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{size} bytes before compression, expected {max_bytes} at most")
        planes = zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise ValueError(f"not compressed by zstandard ({error})") from error
    data, num_low = bytearray(len(planes)), (len(planes) + 1) // 2
    data[0::2], data[1::2] = planes[:num_low], planes[num_low:]
    return bytes(data)
