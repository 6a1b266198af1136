"""Reads what `llama-bench -o json` wrote, so that a report shows llama.cpp's speed beside the artifact's."""

from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from coldpress.schemas.errors import ColdpressError, clipped, printable
from coldpress.schemas.metrics import LlamaCppRun

REMEDY = "give the file that `llama-bench -m MODEL.gguf -o json` wrote"
MAX_BYTES = 1 << 24


class _Test(BaseModel):
    """The fields of a test that are used; llama-bench writes more, which differ from version to version."""

    build_number: int
    cpu_info: str
    model_type: str
    model_size: int = Field(gt=0)
    n_threads: int = Field(gt=0)
    n_prompt: int
    n_gen: int
    avg_ts: float = Field(gt=0)
    stddev_ts: float = Field(ge=0)


def llama_cpp_runs(path: Path) -> tuple[LlamaCppRun, ...]:
    """Returns the runs that generate tokens without a prompt, in the file's order. Raises ColdpressError if the file
    cannot be read, is not of llama-bench, or has no such run; the text is one sentence."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ColdpressError(f"{path}: larger than {MAX_BYTES} bytes, which llama-bench does not write; {REMEDY}")
        tests = TypeAdapter(list[_Test]).validate_json(path.read_bytes())
    except OSError as error:
        raise ColdpressError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ColdpressError(f"{path}: {place}: {clipped(first['msg'])}; {REMEDY}") from error
    runs = tuple(
        LlamaCppRun(
            build=test.build_number,
            cpu=printable(test.cpu_info),
            model_type=printable(test.model_type),
            model_bytes=test.model_size,
            num_threads=test.n_threads,
            tokens_per_s=test.avg_ts,
            tokens_per_s_deviation=test.stddev_ts,
        )
        for test in tests
        if test.n_gen > 0 and test.n_prompt == 0
    )
    if not runs:
        raise ColdpressError(f"{path}: no test generates tokens without a prompt; run llama-bench with -n 128")
    return runs
