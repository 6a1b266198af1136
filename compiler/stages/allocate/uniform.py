"""The same density in every layer, divided among families as the selector does it, or not at all."""

from coldpress.compiler.stages.allocate._task import Rule, Shares, Task


class Plugin(Rule):
    """The selector's own division."""

    def num_variants(self, num_layers: int, num_families: int) -> int:
        """Of the model that run at once: none does."""
        return 0

    def densities(self, task: Task) -> Shares:
        """Density of each family in each layer."""
        return task.same(task.own(task.density))
