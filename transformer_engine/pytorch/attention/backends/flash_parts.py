"""Parts of attention by flash-attn: see `backend.Parts`.

Of whole sequences the package has `[batch, heads, queries]`, of packed ones `[heads, tokens]`.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch.attention.backends.backend import Parts, Requirement, Saved
from transformer_engine.pytorch.attention.backends.varlen import VarlenParts, varlen_parts
from transformer_engine.pytorch.attention.core.call import Call

NO_DROPOUT_IN_PARTS = Requirement(
    lambda problem, allowed: not problem.part or problem.dropout == 0.0,
    "returns no log-sum-exp with dropout, which context parallel ranks need",
)


def _rows(saved: Saved) -> torch.Tensor:
    """`[batch, queries, heads]` or `[tokens, heads]`."""
    inner, _, _ = saved.unwrap()
    if inner.log_sum_exp is None:
        raise RuntimeError(
            "[attention] expected a version of flash-attn whose backward is known here, for context"
            " parallelism, got another one; set NVTE_FLASH_ATTN=0"
        )
    return inner.log_sum_exp.transpose(-1, -2)


def _keep(saved: Saved) -> Saved:
    inner, tensors, facts = saved.unwrap()
    return Saved(None, (), inner.facts).wrap(tensors, facts)


def _restore(rest: Saved, tensors: tuple[torch.Tensor, ...], rows: torch.Tensor) -> Saved:
    inner, others, facts = rest.unwrap()
    found = Saved(rows.transpose(-1, -2).contiguous(), tensors, inner.facts)
    return found.wrap(others, facts)


_PACKED = varlen_parts(VarlenParts(_rows, _keep, _restore))


def _rows_of_call(saved: Saved, call: Call) -> torch.Tensor:
    if call.shape.rule.type.padding:
        return _PACKED.rows(saved, call)
    found = _rows(saved)
    return found.transpose(0, 1) if call.shape.qkv_format == "sbhd" else found


def _keep_of_call(saved: Saved, call: Call) -> Saved:
    return _PACKED.keep(saved, call) if call.shape.rule.type.padding else _keep(saved)


def _restore_of_call(
    rest: Saved, tensors: tuple[torch.Tensor, ...], rows: torch.Tensor, call: Call
) -> Saved:
    if call.shape.rule.type.padding:
        return _PACKED.restore(rest, tensors, rows, call)
    *inputs, out = tensors
    out = out.unflatten(-1, (call.shape.heads, call.shape.value_size))
    if call.shape.qkv_format == "sbhd":
        out, rows = out.transpose(0, 1), rows.transpose(0, 1)
    return _restore(rest, (*inputs, out.contiguous()), rows)


PARTS = Parts(_rows_of_call, _keep_of_call, _restore_of_call)
