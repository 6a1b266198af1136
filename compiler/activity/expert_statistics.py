"""Counts how often tokens use each expert, together with others and again, and how well a cache serves experts.

Pure functions of `used`, bool [T, E]: whether token t uses expert e, in the order of the text. Static sets and caches
are judged on held-out tokens (packed_bits.py); the tokens before them rank the experts, and fill the cache.
"""

import numpy as np

from coldpress.compiler.activity.packed_bits import num_before


def task_counts(used: np.ndarray, tasks: np.ndarray, num_tasks: int) -> np.ndarray:
    """Returns how many tokens of each task use each expert, int64 [num_tasks, E], from `used`, bool [T, E], and each
    token's task, int [T], -1 for none."""
    return np.stack([used[tasks == task].sum(axis=0, dtype=np.int64) for task in range(num_tasks)])


def together(used: np.ndarray) -> np.ndarray:
    """Returns the number of tokens that use both experts of each pair, int64 [E, E]; on the diagonal, one."""
    found = used.astype(np.float64)  # exact up to 2**53, and a fast product
    return (found.T @ found).astype(np.int64)


def static_coverage(used: np.ndarray) -> np.ndarray:
    """Returns the share of the held-out uses that the x hottest experts have, for x = 1 to E, float64 [E]. The tokens
    before rank the experts; of equal ones the lower number is hotter."""
    start = num_before(len(used))
    ranked = np.argsort(-used[:start].sum(axis=0), kind="stable")
    held = used[start:].sum(axis=0)[ranked].cumsum()
    return held / max(1, held[-1])


def stack_distances(used: np.ndarray) -> np.ndarray:
    """Returns where each used expert is in the order of last use, int32 [T, E], from 1 on; 0 for experts not used.

    A cache of x experts that evicts the least recently used one holds the first x of this order, so that one pass
    gives its misses for every x (Mattson et al. 1970, section 4). All experts of a token are looked up before the
    order changes; then they are its first, the highest number in front, as in runtime/cache/lru.py. At the start the
    order is 0 to E - 1: the cache is full.
    """
    distances = np.zeros(used.shape, np.int32)
    last_use = -np.arange(used.shape[1])
    for token, uses in enumerate(used):
        experts = uses.nonzero()[0]
        distances[token, experts] = 1 + (last_use > last_use[experts, None]).sum(axis=1)
        last_use[experts] = np.arange(experts.size) + 1 + token * used.shape[1]
    return distances


def lru_misses(used: np.ndarray) -> np.ndarray:
    """Returns the share of the held-out uses that miss an LRU cache of x experts, for x = 1 to E, float64 [E]."""
    num_experts = used.shape[1]
    counts = np.bincount(stack_distances(used)[num_before(len(used)) :].ravel(), minlength=num_experts + 1)[1:]
    return 1 - counts.cumsum() / max(1, counts.sum())


def persistence(used: np.ndarray, block_tokens: int) -> float:
    """Share of a token's experts that the token before used, over all but the blocks' first tokens; 0 without any."""
    blocks = used.reshape(-1, block_tokens, used.shape[1])
    uses = int(blocks[:, 1:].sum())
    return int((blocks[:, 1:] & blocks[:, :-1]).sum()) / uses if uses else 0.0
