"""A widened checkpoint computes the same logits as its source, and its quantized units repeat the source's values: so
it loses as much by quantization as the real model, and differs only in the bytes of its units."""

from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.io import Workspace
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.rounding._weights import Algorithm, Axis
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName
from tests.support.hf import load_hf
from tests.support.models import write_model
from tests.support.widened import widen

TIMES = 4


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "own head"])
def folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("wide")
    write_model(folder / "source", num_hidden_layers=11, tie=request.param)
    return folder / "source", widen(folder / "source", folder / "wide", TIMES)


def test_logits_are_equal(folders: tuple[Path, Path]) -> None:
    import torch

    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        source, wide = (load_hf(folder)(tokens).logits.numpy() for folder in folders)
    np.testing.assert_allclose(wide, source, atol=1e-5 * np.abs(source).max())


@pytest.mark.parametrize("format_name", ["int4_group32", "q4_1"])
@pytest.mark.parametrize(("role", "axis"), [("gate_proj", "row"), ("down_proj", "column")])
def test_values_of_units_repeat(
    folders: tuple[Path, Path], tmp_path: Path, role: str, axis: Axis, format_name: FormatName
) -> None:
    rounding = Rounding(load("coldpress.compiler.rounding", Algorithm, "rtn"))
    values = []
    for folder in folders:
        model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / folder.name, "test"))
        codes = rounding.codes(model, f"layers.10.{role}.weight", axis, format_name)
        values.append(load("coldpress.runtime.quantization", Format, format_name).decode(codes, model.spec.hidden_size))
    scale = 1 if role == "down_proj" else TIMES
    np.testing.assert_array_equal(values[1] * np.float32(scale), np.tile(values[0], (1, TIMES)))
