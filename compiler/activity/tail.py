"""Says which calibration tokens are held out: the last quarter of the text."""

TAIL_SHARE = 0.25
"""Share of the tokens that is held out."""


def num_before(num_tokens: int) -> int:
    """Returns the number of tokens that choices are made from; at least one token is held out."""
    return num_tokens - max(1, int(num_tokens * TAIL_SHARE))
