"""Joins the divisions of several DRAM budgets into one record: a ladder of plans over one image, which differ in
densities, selector arrays, cache and division of bytes."""

from collections.abc import Sequence

from coldpress.schemas.sparsity import Rung, Sparsity


def with_ladder(largest: Sparsity, smaller: Sequence[Sparsity]) -> Sparsity:
    """Joins budgets that fall; the one set of predictors is limited to what every budget holds."""
    every = (largest, *smaller)
    return largest.model_copy(
        update={
            "ladder": tuple(Rung(**{name: getattr(found, name) for name in Rung.model_fields}) for found in smaller),
            "predictor_rank": tuple(map(min, zip(*(found.predictor_rank for found in every), strict=True))),
            "predictor_limit_bytes": min(found.predictor_limit_bytes for found in every),
        }
    )
