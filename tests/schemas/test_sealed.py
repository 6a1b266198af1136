"""Files that carry their own digest: what the second line says is the digest of the other lines, to the byte."""

import hashlib
import json

import pytest

from coldpress.schemas.sealed import KEY, seal, unseal

BODY = json.dumps({"a": 1.5, "threshold": -1.6166, "words": "é ü"}, indent=2, ensure_ascii=False) + "\n"


def test_the_second_line_is_the_digest_of_the_others():
    lines = seal(BODY).splitlines(keepends=True)
    digest = lines.pop(1).removeprefix('  "body_sha256": "').removesuffix('",\n')
    assert "".join(lines) == BODY
    assert digest == hashlib.sha256(BODY.encode()).hexdigest()
    assert json.loads(seal(BODY)) == json.loads(BODY) | {KEY: digest}


def test_what_was_sealed_is_opened():
    opened = unseal(seal(BODY).encode())
    assert opened.body == BODY.encode()
    assert opened.stated == opened.found


def test_no_flipped_bit_passes():
    data = seal(BODY).encode()
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        opened = unseal(bytes(damaged))
        assert opened.stated != opened.found, damaged


def test_a_value_written_in_another_way_does_not_pass():
    """The same JSON, other bytes: a carriage return before a number, as a flipped bit once made it."""
    opened = unseal(seal(BODY).replace(" -1.6166", "\r-1.6166").encode())
    assert opened.stated != opened.found


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', "[1]", '{\n"body_sha256": "' + "0" * 64 + '",\n}'])
def test_without_the_line_there_is_no_digest(text):
    opened = unseal(text.encode())
    assert (opened.stated, opened.body) == (None, text.encode())


def test_text_without_lines_cannot_be_sealed():
    with pytest.raises(ValueError, match=r"begins with '\{\}'"):
        seal("{}")
