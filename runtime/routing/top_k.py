"""Top-k: the experts with the largest scores, as the model was trained."""

import numpy as np

from coldpress.runtime.routing import Routing


class Plugin(Routing):
    SEES_RESIDENCY = False

    def scores(self, scores_TE: np.ndarray, present_E: np.ndarray, strength: float) -> np.ndarray:
        return scores_TE
