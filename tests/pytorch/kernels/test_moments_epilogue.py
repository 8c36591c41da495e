"""Ops that also compute moments of an input or result: other results keep their bits."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases.moments import assert_row
from rulers import assert_bitwise

from transformer_engine.pytorch.kernels.activation import activation_backward, activation_forward
from transformer_engine.pytorch.kernels.activation import activation_kind as kind_of
from transformer_engine.pytorch.kernels.moments import empty_moments
from transformer_engine.pytorch.kernels.norm import LAYER_NORM, RMS_NORM, norm_forward
from transformer_engine.pytorch.kernels.quantize import quantize

E4M3 = 5
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """Inputs of the ops in `OPS`."""

    x: torch.Tensor
    dy: torch.Tensor
    gamma: torch.Tensor
    scale: torch.Tensor
    scales: torch.Tensor


def inputs(device, shape, dtype=BF16):
    rows, cols = shape
    return Inputs(
        (1 + torch.randn(rows, cols)).to(device, dtype),
        (1e-3 * torch.randn(rows, cols)).to(device, dtype),
        torch.randn(cols).to(device, dtype),
        torch.tensor([3.0], device=device),
        torch.tensor([0.25, 4.0], device=device),
    )


Op = Callable[..., tuple]


def delayed(op: Op, *args, columnwise=True, **more) -> Callable[[Inputs, dict], tuple]:
    """A call of an op with FP8 results, without its plain result."""

    def call(t: Inputs, extra: dict) -> tuple:
        amax = torch.zeros(1, device=t.x.device)
        form = {"scale": t.scale, "amax": amax, "rowwise": True, "columnwise": columnwise}
        return *op(t, *args, **form, **more, **extra), amax

    return call


def cast(columnwise, dbias=None, current=False):
    def call(t, extra):
        amax = None if current else torch.zeros(1, device=t.x.device)
        scale, scales = (None, t.scales) if current else (t.scale, None)
        results = quantize(t.x, E4M3, scale, amax, scales, True, columnwise, dbias, **extra)
        return *results, amax

    return call


def norm(t, kind, out_dtype=None, **more):
    beta = t.gamma if kind == LAYER_NORM else None
    return norm_forward(t.x, t.gamma, beta, kind, 1e-5, False, out_dtype, **more)


def forward(t, name, plain=False, **more):
    return activation_forward(t.x, kind_of(name), plain, **more)


def backward(t, name, plain=False, **more):
    dy = t.dy if kind_of(name) % 2 == 0 else t.dy[:, : t.dy.shape[1] // 2].contiguous()
    return activation_backward(dy, t.x, kind_of(name), plain, **more)


# For each name an op, and a function that returns the value whose moments the op computes.
OPS = {
    "cast": (cast(False), lambda t: t.x),
    "cast transpose": (cast(True), lambda t: t.x),
    "cast transpose dbias": (cast(True, BF16), lambda t: t.x),
    "cast current": (cast(True, current=True), lambda t: t.x),
    "layernorm": (lambda t, e: norm(t, LAYER_NORM, BF16, **e), lambda t: norm(t, 0, BF16)[0]),
    "layernorm fp8": (
        delayed(norm, LAYER_NORM),
        lambda t: delayed(norm, LAYER_NORM, out_dtype=t.x.dtype)(t, {})[0],
    ),
    "rmsnorm current": (
        lambda t, e: norm(t, RMS_NORM, BF16, current=True, **e),
        lambda t: norm(t, RMS_NORM, BF16)[0],
    ),
    "rmsnorm fp8": (
        delayed(norm, RMS_NORM, columnwise=False),
        lambda t: norm(t, RMS_NORM, t.x.dtype)[0],
    ),
    "gelu": (lambda t, e: forward(t, "gelu", True, **e), lambda t: forward(t, "gelu", True)[0]),
    "gelu fp8": (delayed(forward, "gelu"), lambda t: forward(t, "gelu", True)[0]),
    "swiglu current": (
        lambda t, e: forward(t, "swiglu", True, current=True, **e),
        lambda t: forward(t, "swiglu", True)[0],
    ),
    "relu fp8": (delayed(forward, "relu"), lambda t: forward(t, "relu", True)[0]),
    "gelu backward": (
        lambda t, e: backward(t, "gelu", True, **e),
        lambda t: backward(t, "gelu", True)[0],
    ),
    "swiglu backward fp8": (
        delayed(backward, "swiglu", dbias=BF16),
        lambda t: backward(t, "swiglu", True)[0],
    ),
}


def same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise(a, b)


@pytest.mark.parametrize("shape", [(128, 256), (37, 48), (300, 130)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_row_is_right_and_no_other_bit_changes(device, op, shape):
    call, value = OPS[op]
    t = inputs(device, shape)
    row = empty_moments(device)
    same(call(t, {"moments": row}), call(t, {}))
    assert_row(row, value(t))


@pytest.mark.sanitize
@pytest.mark.parametrize("op", OPS)
def test_small(device, op):
    call, value = OPS[op]
    t = inputs(device, (17, 24))
    row = empty_moments(device)
    call(t, {"moments": row})
    assert_row(row, value(t))


@pytest.mark.parametrize("op", OPS)
def test_no_rows(device, op):
    call, _ = OPS[op]
    t = inputs(device, (0, 64))
    row = empty_moments(device)
    same(call(t, {"moments": row}), call(t, {}))
    assert_bitwise(row, empty_moments())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["cast", "cast transpose", "layernorm fp8", "gelu fp8"])
def test_dtypes(device, op, dtype):
    call, value = OPS[op]
    t = inputs(device, (64, 96), dtype)
    row = empty_moments(device)
    call(t, {"moments": row})
    assert_row(row, value(t))


@pytest.mark.parametrize("op", OPS)
def test_flag_on_the_device(device, op):
    call, value = OPS[op]
    t = inputs(device, (40, 64))
    row = empty_moments(device)
    active = torch.zeros(1, dtype=torch.int32, device=device)
    call(t, {"moments": row, "active": active})
    assert_bitwise(row, empty_moments())
    active.fill_(1)
    call(t, {"moments": row, "active": active})
    assert_row(row, value(t))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_graph_follows_the_schedule_on_the_device(op):
    call, value = OPS[op]
    t = inputs("cuda", (256, 512))
    row, active = empty_moments("cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
    call(t, {"moments": row, "active": active})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(t, {"moments": row, "active": active})
    for due in (1, 0, 1):
        row.copy_(empty_moments())
        active.fill_(due)
        t.x.mul_(1.5)
        graph.replay()
        same(captured[:3], call(t, {})[:3])
        if due:
            assert_row(row, value(t))
        else:
            assert_bitwise(row, empty_moments())


def test_as_library_operators(device):
    t = inputs(device, (32, 48))
    row = empty_moments(device)
    args = (t.x, E4M3, t.scale, None, None, True, False, None, row, None)
    torch.ops.te.quantize(*args)
    assert_row(row, t.x)
