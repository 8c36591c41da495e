"""Importing this module raises ImportError where torch is too old.

It is imported first, so that the user reads this message and not one about a missing name of torch.
"""

import torch

from transformer_engine._torch_floor import complaint

if said := complaint(torch.__version__):
    raise ImportError(said)
