"""CUDA graphs of parts of a model: callables that replay them, and checks before a capture."""
