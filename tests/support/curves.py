"""Makes quality curves by hand, with a trace of random signals."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from coldpress.compiler.activity.choice import replayed_layers
from coldpress.compiler.candidates import candidates
from coldpress.compiler.io import PACKED, save_arrays
from coldpress.schemas.curves import Curve, Curves, FormatLoss, Point, Unexplored
from coldpress.schemas.families import BLOCKS, FAMILIES, WHOLE_MLP, activity_of, dense_family, num_units
from coldpress.schemas.model import Model

NO_LOSS = {"mean_kld": 0.0, "mean_kld_error": None, "p999_kld": 0.0, "ppl_ratio_error": 0.001}


def curves_of(
    model: Model,
    folder: Path,
    ratios: Mapping[str, Mapping[float, float]],
    formats: Mapping[str, float] | None = None,
    num_tokens: int = 128,
    format_error: float | None = None,
) -> Curves:
    """Returns curves: method -> density -> perplexity ratio; all other candidates are unexplored."""
    spec, random = model.spec, np.random.default_rng(2)
    layers = replayed_layers(spec)
    width = {activity_of(family, spec): num_units(family, spec) for family in FAMILIES if family != BLOCKS}
    trace = {
        f"{layer}.{signal}": random.standard_normal((num_tokens, size)).astype(np.float16)
        for layer in layers
        for signal, size in width.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    return Curves(
        weights_sha256=model.weights_sha256,
        num_tokens=num_tokens,
        block_tokens=num_tokens,
        curves=tuple(
            Curve(
                method=method,
                points=tuple(Point(density=at, ppl_ratio=ratio, **NO_LOSS) for at, ratio in points.items()),
            )
            for method, points in ratios.items()
        ),
        formats=tuple(
            FormatLoss(format=name, family=family, ppl_ratio=ratio, **{**NO_LOSS, "ppl_ratio_error": format_error})
            for family in dict.fromkeys((WHOLE_MLP, dense_family(spec)))
            for name, ratio in (formats or {}).items()
        ),
        unexplored=tuple(
            Unexplored(method=name, reason="was not measured here")
            for name in candidates(spec, {})
            if name not in ratios
        ),
        trace=save_arrays(folder / f"trace{PACKED}", trace),
        trace_layers=layers,
    )
