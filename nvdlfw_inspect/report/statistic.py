"""Parses the names of statistics, `[RECIPE_]STATISTIC[_columnwise]`."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

RECIPES = ("fp8_delayed_scaling", "fp8_current_scaling", "fp8_block_scaling", "mxfp8", "nvfp4")
COLUMNWISE = "_columnwise"
BLOCKWISE = "max_blockwise_dynamic_range"
SIGNED = ("min", "max", "mean")
PERCENT = ("underflows%", "overflows%")

# The GEMMs that read a tensor; the other tensors that can be inspected are results of GEMMs.
GEMMS_OF_OPERAND = {
    "activation": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}
# The order in which a step produces the tensors; from `gradient` on it is the backward pass.
TENSORS = ("activation", "weight", "output", "gradient", "dgrad", "wgrad")
BACKWARD = TENSORS[3:]


class Statistic(NamedTuple):
    """A parsed name; `recipe` is empty for the recipe in use."""

    base: str
    recipe: str = ""
    columnwise: bool = False

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(name: str) -> Statistic:
        """Parses a name.

        >>> Statistic.parse("fp8_current_scaling_underflows%")
        Statistic(base='underflows%', recipe='fp8_current_scaling', columnwise=False)
        """
        base = name.removesuffix(COLUMNWISE)
        columnwise = base != name
        recipe = next((r for r in RECIPES if base.startswith(f"{r}_")), "")
        if recipe:
            base = base.removeprefix(f"{recipe}_")
        return Statistic(BLOCKWISE if base.startswith(BLOCKWISE) else base, recipe, columnwise)
