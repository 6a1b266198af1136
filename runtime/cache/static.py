"""Static: caches only the pinned units (PowerInfer 5.2, 6); every other unit is read each time it is used."""

import numpy as np

from coldpress.runtime.cache._policy import CachePolicy


class Plugin(CachePolicy):
    admits = False

    def admit(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ids[:0], ids[:0]
