"""The package from which programs import recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
