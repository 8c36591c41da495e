"""The types of tensors that kernels can read as they are: no subclass redefines them."""

import torch

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
