"""Importing this refuses a torch that is too old, before anything asks for what that lacks."""

import torch

from transformer_engine._torch_floor import complaint

if said := complaint(torch.__version__):
    raise ImportError(said)
