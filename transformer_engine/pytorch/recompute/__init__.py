"""Activation checkpointing: parts of a model whose forward runs again in the backward."""
