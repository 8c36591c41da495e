"""The parts that other packages of Transformer Engine share: recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
