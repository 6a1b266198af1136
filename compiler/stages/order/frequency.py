"""Orders the most active units first, ties by id. Keeps hot units together without looking at pairs."""

import numpy as np

from coldpress.compiler.stages.order._task import Arranged, Heuristic, OrderTask


class Plugin(Heuristic):
    COUNT_SQUARES = 0

    def arrange(self, task: OrderTask) -> Arranged:
        return Arranged(np.argsort(-task.activity.totals, kind="stable").astype(np.int32), "frequency")
