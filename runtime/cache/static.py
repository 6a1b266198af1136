"""Static: the pinned units and nothing else (PowerInfer 5.2, 6); every other unit is read each time it is used."""

import numpy as np

from coldpress.runtime.cache._policy import Policy


class Cache(Policy):
    """Ids in, ids out; admits nothing, whatever its capacity."""

    admits = False

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nothing comes in, nothing goes out."""
        return ids[:0], ids[:0]
