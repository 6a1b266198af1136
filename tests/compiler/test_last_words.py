"""compiler/workflow/last_words.py: a failed build ends with the sentence of the job that failed."""

import os
from pathlib import Path

from coldpress.compiler.workflow.last_words import last_words, marks


def write(log: Path, text: str, at_s: int) -> None:
    log.write_text(text)
    os.utime(log, (at_s, at_s))


def test_the_first_sentence_of_this_build(tmp_path: Path) -> None:
    names = ("allocate", "order", "place", "quantize")
    old, crashed, refused, later = (tmp_path / f"{name}.log" for name in names)
    logs = {tmp_path / f"{name}.log": name for name in names}
    write(old, "error: of yesterday\n", 10)
    write(refused, "error: of yesterday, too\n", 10)
    before = marks(logs)
    write(crashed, "Traceback\nKeyError: 3\n", 20)
    write(refused, "place: half\nerror: layer 3 is too large\n", 21)
    write(later, "error: layer 4 is too large\n", 22)
    assert last_words(logs, before) == ("error: layer 3 is too large", 2)


def test_a_job_that_says_nothing_is_named_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "calibrate.log"
    write(log, "calibrate: layer 1\n", 20)
    line, code = last_words({log: "calibrate"}, {})
    assert line.startswith("error: calibrate ended without a sentence of its own")
    assert line.endswith(f"its log is {log}")
    assert code == 1


def test_no_job_began(tmp_path: Path) -> None:
    log = tmp_path / "calibrate.log"
    write(log, "error: of yesterday\n", 20)
    line, code = last_words({log: "calibrate", tmp_path / "none.log": "order"}, marks({log: "calibrate"}))
    assert line.startswith("error: no job began")
    assert code == 1
