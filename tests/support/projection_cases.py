"""Inputs for the tests of `linear_cross_entropy`."""

import torch


def projection(device, dtype, tokens, classes, features):
    """Returns hidden `[*tokens, features]`, weight, bias, and targets of which some are ignored."""
    torch.manual_seed(0)
    sizes = ((*tokens, features), (classes, features), (classes,))
    leaves = [torch.randn(size).to(device, dtype).requires_grad_() for size in sizes]
    target = torch.randint(classes, tokens, device=device)
    target.view(-1)[::5] = -100
    return (*leaves, target)
