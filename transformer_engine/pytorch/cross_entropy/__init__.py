"""Cross entropy of logits, and of a projection to a vocabulary; ranks may share the classes."""

from transformer_engine.pytorch.cross_entropy.linear import linear_cross_entropy
from transformer_engine.pytorch.cross_entropy.parallel import parallel_cross_entropy

__all__ = ["linear_cross_entropy", "parallel_cross_entropy"]
