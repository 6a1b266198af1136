"""One magnitude threshold per family for all layers (DIP Fig. 4): a unit that reaches it is used, in whichever layer.

Over all layers a family uses as much as the selector's own division gives it. DIP found this rule poor, since
magnitudes grow with depth; it serves as the baseline.
"""

from coldpress.compiler.density_allocation import Rule, RuleTask, Shares


class Plugin(Rule):
    def densities(self, task: RuleTask) -> Shares:
        found = {}
        for family, density in task.own.items():
            keys = [key for key in task.keys if key[1] == family]
            low, high = 0.0, max(task.magnitudes(key).level(0.0) for key in keys)
            for _ in range(60):
                level = (low + high) / 2
                mean = sum(task.magnitudes(key).share_above(level) for key in keys) / len(keys)
                low, high = (level, high) if mean > density else (low, level)
            found |= {key: task.magnitudes(key).share_above(high) for key in keys}
        return task.whole_units(found)
