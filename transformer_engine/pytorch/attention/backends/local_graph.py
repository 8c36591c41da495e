"""Makes the pair of functions of a backend from one function that torch differentiates.

The forward runs the function with gradients switched on, on detached aliases of the inputs, and
saves the result. The result holds the graph that autograd has recorded, which is freed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from transformer_engine.pytorch.attention.backends.backend import Saved


def forward(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, Saved]:
    """`function(*inputs)`, and what `backward` reads."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    with torch.enable_grad():
        out = function(*leaves)
    return out.detach(), Saved(None, (out, *leaves))


def backward(grad: torch.Tensor, saved: Saved, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of the inputs; None for one that is not needed, or that the result ignores."""
    out, *leaves = saved.tensors
    assert out is not None
    wanted = [x for x, need in zip(leaves, needs, strict=True) if x is not None and need]
    found = torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
    gradients = iter(found)
    return [next(gradients) if need else None for need in needs]
