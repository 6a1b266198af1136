"""The same density in every layer, divided among families by the selector."""

from coldpress.compiler.stages.allocate._task import Rule, Shares, Task


class Plugin(Rule):
    def num_variants(self, num_layers: int, num_families: int) -> int:
        return 0

    def densities(self, task: Task) -> Shares:
        return task.same(task.own)
