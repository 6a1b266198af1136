"""The same density in every layer, divided among families by the selector."""

from coldpress.compiler.stages.allocate._task import Rule, Shares, Task


class Plugin(Rule):
    def densities(self, task: Task) -> Shares:
        return task.same(task.own)
