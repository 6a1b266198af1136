"""The same density in every layer, divided among families by the selector."""

from coldpress.compiler.density_allocation import Rule, RuleTask, Shares


class Plugin(Rule):
    def densities(self, task: RuleTask) -> Shares:
        return task.same(task.own)
