"""How tensors become FP8: the operands that GEMMs take, and the quantizers that make them."""
