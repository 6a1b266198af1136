"""Curves of how well DRAM serves the experts of a mixture, by the number of experts that a layer may hold."""

from pydantic import Field

from coldpress.schemas.base import Many, PositiveCount, Record, Share


class ExpertCurve(Record):
    """Missed uses of experts by experts held in DRAM, on the last calibration tokens, and what tokens have in common.

    All figures are means over the layers with experts. Entry x - 1 of both curves is for x experts in DRAM.
    """

    num_experts_per_tok: PositiveCount
    lru_misses: Many[Share] = Field(min_length=1)
    """Share of the uses whose expert the x last used ones do not contain (Mattson et al. 1970)."""
    static_misses: Many[Share] = Field(min_length=1)
    """Share of the uses whose expert is not among the x that the tokens before used most."""
    persistence: Share
    """Share of a token's experts that the token before it used, within a block of text."""
    predictability: Share | None
    """Share of a token's experts that their router already chooses from the MLP input of the layer before; None in a
    model with one layer."""
