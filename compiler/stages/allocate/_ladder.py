"""Joins the divisions of several DRAM budgets into one record: a ladder of plans over one image.

Method, format, families, layer groups and predictors are the same for all. Each budget has its own densities, selector
arrays, cache, and division of its bytes.
"""

from collections.abc import Sequence

from coldpress.schemas.sparsity import Rung, Sparsity


def with_ladder(largest: Sparsity, smaller: Sequence[Sparsity]) -> Sparsity:
    """Returns one record for all budgets: `largest`, and those of `smaller`, whose budgets fall.

    An artifact has one set of predictors, so that they are limited to what every budget holds.
    """
    every = (largest, *smaller)
    return largest.model_copy(
        update={
            "ladder": tuple(Rung(**{name: getattr(found, name) for name in Rung.model_fields}) for found in smaller),
            "predictor_rank": tuple(map(min, zip(*(found.predictor_rank for found in every), strict=True))),
            "predictor_limit_bytes": min(found.predictor_limit_bytes for found in every),
        }
    )
