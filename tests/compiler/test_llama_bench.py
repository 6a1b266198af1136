"""What llama-bench wrote is read, and what it did not write is refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.llama_bench import llama_cpp_runs
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import LlamaCppRun
from tests.support.llama_bench import write_llama_bench


def test_only_runs_that_generate_are_taken(tmp_path: Path) -> None:
    prompt = {"n_prompt": 512, "n_gen": 0, "avg_ts": 80.0}
    both = {"n_prompt": 512, "avg_ts": 20.0}
    path = write_llama_bench(tmp_path / "bench.json", prompt, {}, both, {"n_threads": 2, "avg_ts": 3.5})
    first, second = llama_cpp_runs(path)
    assert first == LlamaCppRun(
        build=11549,
        cpu="Cortex-X1",
        model_type="llama 7B Q4_0",
        model_bytes=3_825_065_984,
        num_threads=4,
        tokens_per_s=5.123456,
        tokens_per_s_deviation=0.04,
    )
    assert (second.num_threads, second.tokens_per_s) == (2, 3.5)


def test_names_stay_on_their_line(tmp_path: Path) -> None:
    (found,) = llama_cpp_runs(write_llama_bench(tmp_path / "bench.json", {"cpu_info": "a\nb\x1b[2J"}))
    assert found.cpu == "a\\nb\\x1b[2J"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_prompt": 512, "n_gen": 0}, "no test generates tokens without a prompt; run llama-bench with -n 128"),
        ({"avg_ts": 0}, "0.avg_ts: Input should be greater than 0; give the file that"),
        ({"avg_ts": "NaN"}, "0.avg_ts: "),
        ({"model_size": None}, "0.model_size: Input should be a valid integer; give the file that"),
    ],
)
def test_other_figures_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path = write_llama_bench(tmp_path / "bench.json", changes)
    with pytest.raises(ColdpressError) as refused:
        llama_cpp_runs(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("text", ["", "{}", "| model | size |", "[1]"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ColdpressError, match="give the file that `llama-bench -m"):
        llama_cpp_runs(path)
    with pytest.raises(ColdpressError, match="cannot be read"):
        llama_cpp_runs(tmp_path)
