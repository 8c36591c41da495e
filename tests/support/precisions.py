"""The precisions that tests run in: recipes by name, and an autocast for each."""

from contextlib import AbstractContextManager, nullcontext

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}


def scope(precision: str, **more: object) -> AbstractContextManager:
    """Returns an autocast with the recipe, or a null context for high precision."""
    recipe = RECIPES[precision]
    return nullcontext() if recipe is None else te.fp8_autocast(fp8_recipe=recipe, **more)
