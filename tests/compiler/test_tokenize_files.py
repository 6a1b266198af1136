"""Which files of a folder a corpus is made of: none is left out in silence."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.stages.tokenize.text import read_corpus
from coldpress.schemas.errors import ColdpressError


def test_a_line_feed_in_a_name_leaves_no_file_out(tmp_path: Path) -> None:
    (tmp_path / "a\nb.txt").write_text("A fox. " * 400)
    (tmp_path / "c.txt").write_text("Two hares. " * 400)
    texts = [text for split in read_corpus(str(tmp_path), 0).splits.values() for text in split]
    assert any("fox" in text for text in texts)
    assert any("hares" in text for text in texts)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name}. " * 400)
    real = os.scandir

    def refusing(folder: Any) -> Any:
        if os.fspath(folder).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ColdpressError, match=r"its folder shut cannot be read \(Permission denied\)"):
        read_corpus(str(tmp_path), 0)
