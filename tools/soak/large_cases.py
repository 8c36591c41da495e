"""The cases of `large`: calls whose arguments can be sliced along the first axis, and checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.kernels.activation import (
    activation_backward,
    activation_forward,
    activation_kind,
    is_gated,
)
from transformer_engine.pytorch.kernels.amax import amax
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.kernels.dropout_add import dropout_add_backward, dropout_add_forward
from transformer_engine.pytorch.kernels.gemm import gemm
from transformer_engine.pytorch.kernels.merge_parts import merge_parts
from transformer_engine.pytorch.kernels.moments import empty_moments, moments
from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
    norm_backward,
    norm_forward,
)
from transformer_engine.pytorch.kernels.quantize import quantize
from transformer_engine.pytorch.kernels.quantize_blocks import quantize_blocks
from transformer_engine.pytorch.kernels.rope import rope
from transformer_engine.pytorch.kernels.softmax import softmax_backward, softmax_forward
from transformer_engine.pytorch.kernels.transpose import transpose
from transformer_engine.pytorch.optimizers import FusedAdam

BF16, E4M3 = torch.bfloat16, 5
COLS = 4096
_ROWS, _SQUARES = 16 + E4M3, 32 + E4M3  # layouts of scale blocks
Results = Sequence[torch.Tensor]


@dataclass
class Work:
    """A call, `call(*inputs, *places)`, that returns results and merges values into `places`."""

    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., Results]
    places: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A call on many rows.

    Attributes:
        make: makes the call, for a number of rows and a device.
        elements: elements in a row of the largest tensor.
        multiple: slices begin at multiples of this number of rows.
        exact: whether slices give bitwise the same results.
    """

    make: Callable[[int, str], Work]
    elements: int = COLS
    multiple: int = 128
    exact: bool = True


def values(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normally distributed values, drawn in place."""
    return torch.empty(shape, device=device, dtype=dtype).normal_()


def _scaled(device: str, amax_place: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of a fused cast with delayed scaling, row-wise and transposed."""
    one = torch.ones(1, device=device)
    return {"scale": one, "amax": amax_place, "rowwise": True, "columnwise": True}


def _places(device: str) -> list[torch.Tensor]:
    return [torch.zeros(1, device=device), empty_moments(device)]


def _quantize(rows: int, device: str) -> Work:
    one = torch.ones(1, device=device)

    def call(x: torch.Tensor, largest: torch.Tensor, row: torch.Tensor) -> Results:
        made = quantize(x, E4M3, one, largest, None, True, True, torch.float32, row)
        return made[0], made[1], made[3]

    return Work((values(device, rows, COLS),), call, _places(device))


def _blocks(layout: int) -> Callable[[int, str], Work]:
    def make(rows: int, device: str) -> Work:
        def call(x: torch.Tensor) -> Results:
            return quantize_blocks(x, layout, True, 0.0, True, True, torch.float32)

        return Work((values(device, rows, COLS),), call)

    return make


def _codes(rows: int, device: str) -> torch.Tensor:
    return torch.randint(0, 120, (rows, COLS), device=device, dtype=torch.uint8)


def _dequantize(rows: int, device: str) -> Work:
    scales = torch.tensor([0.5, 2.0], device=device)
    codes = _codes(rows, device)
    return Work((codes,), lambda codes: [dequantize(codes, E4M3, scales, BF16)])


def _amax(rows: int, device: str) -> Work:
    def call(x: torch.Tensor, largest: torch.Tensor) -> Results:
        largest.copy_(torch.maximum(largest, amax(x)))
        return ()

    return Work((values(device, rows, COLS),), call, [torch.zeros(1, device=device)])


def _moments(rows: int, device: str) -> Work:
    def call(x: torch.Tensor, row: torch.Tensor) -> Results:
        moments(x, row)
        return ()

    return Work((values(device, rows, COLS),), call, [empty_moments(device)])


def _norm_forward(kind: int) -> Callable[[int, str], Work]:
    def make(rows: int, device: str) -> Work:
        gamma = values(device, COLS)
        beta = values(device, COLS) if kind == LAYER_NORM else None

        def call(x: torch.Tensor, largest: torch.Tensor, row: torch.Tensor) -> Results:
            fused = _scaled(device, largest)
            made = norm_forward(x, gamma, beta, kind, 1e-5, False, BF16, **fused, moments=row)
            return [made[0], made[1], made[2], made[5]]

        return Work((values(device, rows, COLS),), call, _places(device))

    return make


def _norm_backward(kind: int) -> Callable[[int, str], Work]:
    def make(rows: int, device: str) -> Work:
        gamma, means = values(device, COLS, dtype=torch.float32), kind == LAYER_NORM
        mean = values(device, rows, dtype=torch.float32) if means else None
        rstd = values(device, rows, dtype=torch.float32).abs()
        tall = (values(device, rows, COLS), values(device, rows, COLS))

        def call(dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, *mean: Any) -> Results:
            made = norm_backward(dy, x, gamma, *(mean or (None,)), rstd, kind, False)
            return [x for x in made if x is not None]

        return Work((*tall, rstd, *([] if mean is None else [mean])), call)

    return make


def _activation_forward(name: str) -> Callable[[int, str], Work]:
    kind = activation_kind(name)

    def make(rows: int, device: str) -> Work:
        def call(x: torch.Tensor, largest: torch.Tensor, row: torch.Tensor) -> Results:
            fused = _scaled(device, largest)
            return activation_forward(x, kind, True, E4M3, **fused, moments=row)[:3]

        return Work((values(device, rows, COLS),), call, _places(device))

    return make


def _activation_backward(name: str) -> Callable[[int, str], Work]:
    kind = activation_kind(name)

    def make(rows: int, device: str) -> Work:
        grad = values(device, rows, COLS // (1 + is_gated(kind)))

        def call(dy: torch.Tensor, x: torch.Tensor, largest: torch.Tensor) -> Results:
            fused = _scaled(device, largest)
            made = activation_backward(dy, x, kind, True, E4M3, **fused, dbias=torch.float32)
            return made[0], made[1], made[2], made[4]

        return Work((grad, values(device, rows, COLS)), call, [torch.zeros(1, device=device)])

    return make


def _softmax_forward(rows: int, device: str) -> Work:
    x = values(device, rows, 4, 512, 512)
    return Work((x,), lambda x: [softmax_forward(x, None, 0.5, -1, 0, 0)])


def _softmax_backward(rows: int, device: str) -> Work:
    tall = (values(device, rows, 4, 512, 512), values(device, rows, 4, 512, 512))
    return Work(tall, lambda dy, y: [softmax_backward(dy, y, 0.5)])


def _rope(rows: int, device: str) -> Work:
    freqs = values(device, 256, 64, dtype=torch.float32)
    x = values(device, rows, 256, 16, 64)
    return Work((x,), lambda x: [rope(x, freqs, None, None, True, False, False)])


def _merge_parts(rows: int, device: str) -> Work:
    tall = (values(device, rows, 256, 16, 64), values(device, rows, 256, 16, 64))
    sums = (values(device, rows, 256, 16, dtype=torch.float32) for _ in range(2))

    def call(out: torch.Tensor, part: torch.Tensor, *sums: torch.Tensor) -> Results:
        merged, own = out.clone(), sums[0].clone()
        merge_parts(merged, own, [part], [sums[1]], [0])
        return merged, own

    return Work((*tall, *sums), call)


def _dropout_add_forward(rows: int, device: str) -> Work:
    bias = values(device, COLS)
    tall = (values(device, rows, COLS), values(device, rows, COLS))
    return Work(tall, lambda x, other: [dropout_add_forward(x, bias, other, None, 0.0)])


def _dropout_add_backward(rows: int, device: str) -> Work:
    def call(grad: torch.Tensor) -> Results:
        made = dropout_add_backward(grad, None, 0.0, torch.float32, torch.float32)
        return [x for x in made if x is not None]

    return Work((values(device, rows, COLS),), call)


def _gemm(rows: int, device: str) -> Work:
    """A GEMM with a large result."""
    b = values(device, COLS, 512)
    return Work((values(device, rows, 512),), lambda a: [gemm(a, b, BF16)])


def _gemm_of_codes(rows: int, device: str) -> Work:
    """An FP8 GEMM with a large operand."""
    one = torch.ones(2, device=device)
    b = torch.randint(0, 120, (64, COLS), device=device, dtype=torch.uint8)

    def call(a: torch.Tensor) -> Results:
        return [gemm(a, b, BF16, one, one, E4M3, E4M3)]

    return Work((_codes(rows, device),), call)


def _weight_gradient(rows: int, device: str) -> Work:
    """A GEMM that sums over many rows."""

    def call(dy: torch.Tensor, x: torch.Tensor) -> Results:
        return [gemm(dy, x, torch.float32, a_transposed=True, b_transposed=True)]

    return Work((values(device, rows, 64), values(device, rows, COLS)), call)


def _cross_entropy(rows: int, device: str) -> Work:
    target = torch.randint(0, COLS, (rows,), device=device)

    def call(logits: torch.Tensor, target: torch.Tensor) -> Results:
        leaf = logits.detach().clone().requires_grad_()
        loss = te.parallel_cross_entropy(leaf[None], target[None])[0]
        loss.backward(torch.ones_like(loss))
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    return Work((values(device, rows, COLS), target), call)


def _adam(rows: int, device: str) -> Work:
    def call(value: torch.Tensor, grad: torch.Tensor) -> Results:
        weight = torch.nn.Parameter(value.clone())
        weight.grad = grad
        FusedAdam([weight], lr=1e-2).step()
        return [weight.detach()]

    return Work(tuple(values(device, rows, COLS, dtype=torch.float32) for _ in range(2)), call)


def _attention(rows: int, device: str) -> Work:
    attention = te.DotProductAttention(16, 64, qkv_format="bshd", attn_mask_type="causal")

    def call(*parts: torch.Tensor) -> Results:
        leaves = [x.detach().requires_grad_() for x in parts]
        y = attention(*leaves)
        y.backward(torch.ones_like(y))
        return [y.detach(), *[x.grad for x in leaves if x.grad is not None]]

    return Work(tuple(values(device, rows, 512, 16, 64) for _ in range(3)), call)


def _module(make_module: Callable[[str], torch.nn.Module], *row: int) -> Callable[[int, str], Work]:
    """Forward and backward of a copy of the module with delayed scaling, in a fresh state."""

    def make(rows: int, device: str) -> Work:
        module = make_module(device)

        def call(x: torch.Tensor, dy: torch.Tensor) -> Results:
            own, leaf = copy.deepcopy(module), x.detach().requires_grad_()
            with te.fp8_autocast(fp8_recipe=DelayedScaling()):
                y = own(leaf)
            y.backward(dy)
            grads = [leaf.grad, *[p.grad for p in own.parameters()]]
            return [y.detach(), *[x for x in grads if x is not None]]

        return Work((values(device, rows, *row), values(device, rows, *row)), call)

    return make


def _linear(device: str) -> torch.nn.Module:
    return te.Linear(1024, 1024, params_dtype=BF16, device=device)


def _mlp(device: str) -> torch.nn.Module:
    return te.LayerNormMLP(1024, COLS, params_dtype=BF16, device=device)


def _layer(device: str) -> torch.nn.Module:
    sizes = (1024, COLS, 16)
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(
        *sizes, **options, attn_input_format="bshd", params_dtype=BF16, device=device
    )


CASES: dict[str, Case] = {
    "quantize": Case(_quantize),
    "quantize_blocks, rows": Case(_blocks(_ROWS), multiple=512),
    "quantize_blocks, squares": Case(_blocks(_SQUARES), multiple=512),
    "dequantize": Case(_dequantize),
    "transpose": Case(
        lambda rows, device: Work((_codes(rows, device),), lambda codes: [transpose(codes)])
    ),
    "amax": Case(_amax),
    "moments": Case(_moments),
    "norm_forward, LayerNorm": Case(_norm_forward(LAYER_NORM)),
    "norm_forward, RMSNorm": Case(_norm_forward(RMS_NORM)),
    "norm_backward, LayerNorm": Case(_norm_backward(LAYER_NORM)),
    "norm_backward, RMSNorm": Case(_norm_backward(RMS_NORM)),
    "activation_forward, gelu": Case(_activation_forward("gelu")),
    "activation_forward, swiglu": Case(_activation_forward("swiglu")),
    "activation_backward, gelu": Case(_activation_backward("gelu")),
    "activation_backward, swiglu": Case(_activation_backward("swiglu")),
    "softmax_forward": Case(_softmax_forward, 1 << 20, 1),
    "softmax_backward": Case(_softmax_backward, 1 << 20, 1),
    "rope": Case(_rope, 1 << 18, 1),
    "merge_parts": Case(_merge_parts, 1 << 18, 1),
    "dropout_add_forward": Case(_dropout_add_forward),
    "dropout_add_backward": Case(_dropout_add_backward),
    "gemm": Case(_gemm, exact=False),
    "gemm of FP8": Case(_gemm_of_codes, exact=False),
    "gemm, weight gradient": Case(_weight_gradient, exact=False),
    "parallel_cross_entropy": Case(_cross_entropy),
    "FusedAdam": Case(_adam),
    "DotProductAttention": Case(_attention, 1 << 19, 1, exact=False),
    "Linear": Case(_module(_linear, 1024), 1024, exact=False),
    "LayerNormMLP": Case(_module(_mlp, 1024), exact=False),
    "TransformerLayer": Case(_module(_layer, 512, 1024), 512 * COLS, 1, exact=False),
}


def _dropout(bound: int, device: str) -> list[str]:
    """Forward and backward drop the same elements, and the pattern does not repeat at the bound."""
    rows = bound // COLS + 128
    seed = torch.tensor([7], device=device)
    out = dropout_add_forward(
        torch.ones(rows, COLS, device=device, dtype=BF16), None, None, seed, 0.5
    )
    back, _ = dropout_add_backward(torch.ones_like(out), seed, 0.5, BF16, None)
    assert back is not None
    problems = [] if torch.equal(out, back) else ["backward keeps other elements than forward"]
    if torch.equal(out[:128], out[bound // COLS :]):
        problems.append("the pattern repeats")
    return problems


def _permutation(bound: int, device: str) -> list[str]:
    """Permuted rows are in the order of the sorted map, and unpermuting restores them."""
    rows = bound // COLS + 128
    x, experts = values(device, rows, COLS), torch.randint(0, 4, (rows, 1), device=device)
    sorted_rows, places = te.moe_permute(x, experts.int(), map_type="index")
    order = experts[:, 0].sort(stable=True).indices
    step = max(1, (1 << 26) // COLS)
    problems = []
    for begin in range(0, rows, step):
        if not torch.equal(sorted_rows[begin : begin + step], x[order[begin : begin + step]]):
            problems.append(f"rows from {begin} on are others")
    if not torch.equal(te.moe_unpermute(sorted_rows, places, map_type="index"), x):
        problems.append("rows come back otherwise")
    return problems


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "dropout": _dropout,
    "moe_permute": _permutation,
}
