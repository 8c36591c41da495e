"""Training steps of FP8 attention, for comparisons of two backends."""

from dataclasses import dataclass

import pytest
import torch
from cases import names

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format


@dataclass(frozen=True)
class Case:
    mask_type: str = "causal"
    qkv_format: str = "bshd"
    dtype: torch.dtype = torch.bfloat16
    queries: int = 128
    keys: int = 128
    heads: int = 4
    groups: int = 4
    size: int = 128
    window: tuple[int, int] | None = None
    format: Format = Format.HYBRID
    packed: bool = False
    by_head: bool = False  # if packed: query, key and value of each head lie together
    frozen: bool = False  # keys need no gradient

    def __str__(self):
        return names.of_case(self)

    @property
    def has_backward(self):
        """Whether cuDNN's backward in FP8 takes it."""
        return self.queries % 128 == self.keys % 128 == 0


CASES = [
    Case(),
    Case("no_mask", "sbhd", torch.float16, keys=384),
    Case("causal", "sbhd", groups=1, packed=True),
    Case("no_mask", packed=True, by_head=True),
    Case("no_mask", groups=2, dtype=torch.float32),
    Case("causal", format=Format.E4M3),
    Case("causal", queries=256, keys=256, window=(40, 0)),
    Case("no_mask", queries=77, keys=133, frozen=True),
]
# Every case with the backward in high precision ("0") and, where cuDNN supports it, in FP8 ("1").
RUNS = [
    pytest.param(case, backward, id=f"{case} {backward}")
    for case in CASES
    for backward in ("0", "1")[: 1 + case.has_backward]
]


def core_of(case):
    return te.DotProductAttention(
        case.heads,
        case.size,
        case.groups,
        qkv_format=case.qkv_format,
        attn_mask_type=case.mask_type,
        window_size=case.window,
    )


def tensors_of(case, device):
    def lead(n):
        return (n, 2) if case.qkv_format == "sbhd" else (2, n)

    heads, made = (case.heads, case.groups, case.groups), {"device": device, "dtype": case.dtype}
    if case.by_head:
        x = torch.randn(*lead(case.queries), case.heads, 3, case.size, **made).unbind(-2)
    elif case.packed:
        x = torch.randn(*lead(case.queries), sum(heads), case.size, **made).split(heads, 2)
    else:
        lengths = (case.queries, case.keys, case.keys)
        pairs = zip(lengths, heads, strict=True)
        x = [torch.randn(*lead(length), n, case.size, **made) for length, n in pairs]
    needs = (True, not case.frozen, True)
    return [t.detach().requires_grad_(need) for t, need in zip(x, needs, strict=True)]


def steps_of(module, case, device, steps=3, wrap=lambda f, *a: f(*a)):
    """Returns result, gradients, scales and amaxes of the last step."""
    recipe = DelayedScaling(amax_history_len=2, fp8_dpa=True, fp8_format=case.format)
    for step in range(steps):
        torch.manual_seed(step)
        x = tensors_of(case, device)
        with te.fp8_autocast(fp8_recipe=recipe):
            out = wrap(module, *x)
        out.backward(torch.randn_like(out))
    states = [t for s in module.scaling.values() for t in (s.scale, s.amax_history[-1])]
    found = [out.detach(), *(t.grad for t in x if t.requires_grad)]
    return [t.clone() for t in (*found, *states)]


def assert_near(results, expected):
    """Compares result, gradients and scales of two backends, which round at different places.

    Two roundings of the weights to E4M3 and two of the result give a relative error of 0.05.
    Gradients are further apart: `sum(d out * out)` should cancel other terms, but rounding to FP8
    changes it.
    """
    assert len(results) == len(expected)
    for i, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        assert got.dtype is wanted.dtype and got.shape == wanted.shape
        error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
        assert error < (0.06 if i == 0 else 0.15), f"tensor {i}: relative error {error:.3f}"
