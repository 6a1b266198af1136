"""Puts a tensor of transformers together from the roles whose rows it holds."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fused(roles: tuple[str, ...], of_role: "Callable[[str], Tensor]") -> "Tensor":
    """Returns the stacked rows of `roles`, [rows, ...] each by `of_role`; a role that appears n times gives the next
    nth of its rows at each place."""
    import torch

    if len(roles) == 1:
        return of_role(roles[0])
    parts = {role: iter(of_role(role).chunk(count)) for role, count in Counter(roles).items()}
    return torch.cat([next(parts[role]) for role in roles])
