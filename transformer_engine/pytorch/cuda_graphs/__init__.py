"""What CUDA graphs need of a model: the callables that replay it, and what a capture forbids."""
