"""`backend.Parts` of flash-attn: attention with some of the keys, for context parallelism.

The package returns the log-sum-exp as `[batch, heads, queries]`, or as `[heads, tokens]` for packed
sequences; `Parts` needs the heads last.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.backend import (
    Backend,
    KernelParts,
    Parts,
    Requirement,
    Saved,
)
from transformer_engine.pytorch.attention.backends.flash import Kernels, importable, requirements
from transformer_engine.pytorch.attention.backends.strides import readable
from transformer_engine.pytorch.attention.backends.varlen import varlen_parts
from transformer_engine.pytorch.attention.core.call import Call

NO_DROPOUT_IN_PARTS = Requirement(
    lambda problem, allowed: not problem.part or problem.dropout == 0.0,
    "returns no log-sum-exp with dropout, which context parallel ranks need",
)


def _log_sum_exp(saved: Saved) -> torch.Tensor:
    """`[batch, queries, heads]` or `[tokens, heads]`."""
    inner, _, _ = saved.unwrap()
    if inner.log_sum_exp is None:
        raise RuntimeError(
            "[attention] expected a version of flash-attn whose backward is known here, for context"
            " parallelism, got another one; set NVTE_FLASH_ATTN=0"
        )
    return inner.log_sum_exp.transpose(-1, -2)


def _strip(saved: Saved) -> Saved:
    inner, tensors, facts = saved.unwrap()
    return inner.stripped().wrap(tensors, facts)


def _restore(stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor) -> Saved:
    inner, others, facts = stripped.unwrap()
    *inputs, out = tensors
    tensors = (*[readable(x) for x in inputs], out)
    found = Saved(lse.transpose(-1, -2).contiguous(), tensors, inner.facts)
    return found.wrap(others, facts)


_PACKED = varlen_parts(KernelParts(_log_sum_exp, _strip, _restore))


def _log_sum_exp_of_call(saved: Saved, call: Call) -> torch.Tensor:
    if call.shape.rule.type.padding:
        return _PACKED.log_sum_exp(saved, call)
    found = _log_sum_exp(saved)
    return found.transpose(0, 1) if call.shape.qkv_format == "sbhd" else found


def _strip_of_call(saved: Saved, call: Call) -> Saved:
    return _PACKED.strip(saved, call) if call.shape.rule.type.padding else _strip(saved)


def _restore_of_call(
    stripped: Saved, tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: Call
) -> Saved:
    if call.shape.rule.type.padding:
        return _PACKED.restore(stripped, tensors, lse, call)
    *inputs, out = tensors
    out = out.unflatten(-1, (call.shape.heads, call.shape.value_size))
    if call.shape.qkv_format == "sbhd":
        out, lse = out.transpose(0, 1), lse.transpose(0, 1)
    return _restore(stripped, (*inputs, out.contiguous()), lse)


PARTS = Parts(_log_sum_exp_of_call, _strip_of_call, _restore_of_call)


def flash_backend(
    kernels: Kernels, number: int, oldest: str, *own: Requirement, differentiable: bool = False
) -> Backend:
    """The backend of a version; `own` are its requirements beside those that all versions share."""
    switch = Requirement(
        lambda problem, allowed: getattr(allowed, f"flash{number}"),
        f"switched off by NVTE_FLASH_ATTN_V{number}=0",
    )
    return Backend(
        f"flash{number}",
        kernels.forward,
        kernels.backward,
        keeps_scores=False,
        requirements=(switch, *requirements(kernels.source, oldest), *own, importable(kernels)),
        differentiable=differentiable,
        parts=PARTS,
    )
