"""flash-attn 4, package `flash_attn.cute`: kernels compiled at their first call, for Hopper on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._torch_private import apply_of, once_differentiable
from transformer_engine.pytorch.attention.backends.backend import (
    EAGER,
    NO_BIAS,
    NO_DROPOUT,
    Backend,
    Requirement,
)
from transformer_engine.pytorch.attention.backends.flash import (
    Kernels,
    Options,
    batch_first,
    package,
    requirements,
)
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.packed import empty_like_parts, places_of

SOURCE = package("flash-attn-4", "flash_attn.cute")
_SIZES = (64, 128)


# Parameters of `interface._flash_attn_bwd` that are passed to it, always by name.
_PASSED = {
    *("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"),
    *("softmax_scale", "causal", "window_size_left", "window_size_right", "deterministic"),
}


class _Plan(NamedTuple):
    """A call to the package, and where its tensors lie.

    Attributes:
        forward: the public function.
        backward: the one that writes gradients where it is told to.
        keywords: arguments of `forward` beside the tensors.
        batch_second: tensors are sbhd.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    keywords: dict[str, Any]
    batch_second: bool


class _Packed(torch.autograd.Function):
    """Attention of queries, keys and values that fill one tensor; so do their gradients.

    The package's own function makes three gradients, which are then copied into that one.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        inputs = batch_first(plan.batch_second, query, key, value)
        out, statistics = plan.forward(*inputs, **plan.keywords, return_lse=True)
        ctx.save_for_backward(query, key, value, out, statistics)
        ctx.plan = plan
        result: torch.Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, out, statistics = ctx.saved_tensors
        plan = ctx.plan
        gradients = empty_like_parts(*inputs)
        q, k, v, dq, dk, dv = batch_first(plan.batch_second, *inputs, *gradients)
        said = dict(plan.keywords)
        left, right = said.pop("window_size")
        plan.backward(
            q=q,
            k=k,
            v=v,
            out=out,
            dout=grad,
            lse=statistics,
            dq=dq,
            dk=dk,
            dv=dv,
            window_size_left=left,
            window_size_right=right,
            **said,
        )
        return None, *gradients


_apply = apply_of(_Packed)


def _writing_backward(module: Any) -> Callable[..., Any] | None:
    """The package's function that writes gradients into memory of ours; None if it has none.

    It is not public, so it counts only with the parameters that it is known by.
    """
    backward = getattr(getattr(module, "interface", None), "_flash_attn_bwd", None)
    if not _PASSED.issubset(_parameters(backward)):
        return None
    return backward if "return_lse" in _parameters(module.flash_attn_func) else None


@lru_cache(maxsize=8)
def _parameters(function: Any) -> frozenset[str]:
    """Names of a function's parameters; none of what cannot be asked."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


class _Kernels(Kernels):
    def keywords(self, said: Options, call: Call, device: torch.device) -> dict[str, Any]:
        left, right = (None if side < 0 else side for side in said.window_size)
        keywords = {**said._asdict(), "window_size": (left, right)}
        if call.sink.offset is not None:
            keywords["learnable_sink"] = call.sink.offset
        return keywords

    def attend_whole(
        self, inputs: tuple[torch.Tensor, ...], keywords: dict[str, Any], batch_second: bool
    ) -> torch.Tensor:
        """See `Kernels`."""
        recorded = torch.is_grad_enabled() and any([x.requires_grad for x in inputs])
        if recorded and "learnable_sink" not in keywords and places_of(*inputs) is not None:
            backward = _writing_backward(self.module)
            if backward is not None:
                plan = _Plan(self.module.flash_attn_func, backward, keywords, batch_second)
                out: torch.Tensor = _apply(plan, *inputs)
                return out
        return super().attend_whole(inputs, keywords, batch_second)


KERNELS = _Kernels(SOURCE)
BACKEND = Backend(
    "flash4",
    KERNELS.attend,
    keeps_scores=False,
    requirements=(
        Requirement(
            lambda problem, allowed: allowed.flash4, "switched off by NVTE_FLASH_ATTN_V4=0"
        ),
        *requirements(SOURCE, "4.0.0b1"),
        Requirement(
            lambda problem, allowed: problem.capability is None or problem.capability >= (9, 0),
            "needs a GPU of Hopper or later (compute capability 9.0)",
        ),
        # 4.0.0b36 on an H200: with heads of 16 wrong gradients, and memory that is not its own.
        Requirement(
            lambda problem, allowed: problem.key_size == problem.value_size in _SIZES,
            f"is trusted with heads of a size of {' or '.join(map(str, _SIZES))} only",
        ),
        NO_BIAS,
        NO_DROPOUT,
        EAGER,
    ),
)
