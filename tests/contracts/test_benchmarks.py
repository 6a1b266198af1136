"""What every benchmark ends with: a line that any JSON parser reads."""

import json
import math

import numpy as np
import pytest

from tests.benchmarks._report import finish


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def test_the_last_line_is_json_whatever_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    finish({"ppl": math.inf, "rows": [{"ppl": np.float64("nan"), "model": "tiny"}, (1.5, -math.inf)], "count": 3})
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last, parse_constant=refuse)
    assert found == {"ppl": None, "rows": [{"ppl": None, "model": "tiny"}, [1.5, None]], "count": 3}
