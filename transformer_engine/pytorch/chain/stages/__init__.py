"""Stages: the norms, GEMMs and activations of which every module is a list."""

from transformer_engine.pytorch.chain.stage import Saved, Stage
from transformer_engine.pytorch.chain.stages.activation import Activation
from transformer_engine.pytorch.chain.stages.matmul import Matmul
from transformer_engine.pytorch.chain.stages.norm import Norm

__all__ = ["Activation", "Matmul", "Norm", "Saved", "Stage"]
