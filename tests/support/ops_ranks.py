"""Compares operations on two ranks with one process: collectives, and tensor-parallel layers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attempts import failures
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.optimizers import clip_factor

ROWS, HIDDEN, FFN = 16, 32, 64
PRECISIONS: dict[str, tuple[bool, float]] = {"fp32": (False, 1e-5), "fp8": (True, 0.1)}


def _drawn(*shape: int) -> torch.Tensor:
    """Draws the same numbers on all ranks, and new ones in each call."""
    return torch.randn(*shape, device=here())


def _gathered(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def _passes(
    operation: ops.FusibleOperation, x: torch.Tensor, upstream: torch.Tensor, wanted: Any
) -> None:
    """Compares result and input gradient: eager, of a copy, and compiled."""
    compiled = torch.compile(copy.deepcopy(operation), backend="aot_eager")
    for run in (operation, ops.Sequential(copy.deepcopy(operation)), compiled):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.backward(upstream)
        for one, other in zip((out, leaf.grad), wanted, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(leaf.detach(), x)  # no collective has overwritten the input


def all_gather(rank: int) -> None:
    """Gathers the rows of both ranks; the gradient is summed and split."""
    x, grads = _drawn(2, 3, 4), _drawn(2, 6, 4)
    wanted = (x.flatten(0, 1), grads.sum(0)[3 * rank : 3 * rank + 3])
    _passes(ops.AllGather(dist.group.WORLD), x[rank], grads[rank], wanted)
    _passes(ops.AllGather(), x[rank], grads[rank], wanted)


def reduce_scatter(rank: int) -> None:
    """Returns this rank's half of the sum; the gradient is gathered."""
    x, grads = _drawn(2, 6, 4), _drawn(2, 3, 4)
    wanted = (x.sum(0)[3 * rank : 3 * rank + 3], grads.flatten(0, 1))
    _passes(ops.ReduceScatter(dist.group.WORLD), x[rank], grads[rank], wanted)
    try:
        ops.ReduceScatter()(_drawn(3, 4))
    except ValueError as error:
        assert "[ReduceScatter] expected rows divisible among 2 ranks, got (3, 4)" in str(error)
    else:
        raise AssertionError("3 rows were shared by 2 ranks")


def all_reduce(rank: int) -> None:
    """Returns the sum; the gradient is equal on both ranks and stays as it is."""
    x, grad = _drawn(2, 6, 4), _drawn(6, 4)
    for flag in (True, False):
        operation = ops.AllReduce(dist.group.WORLD, reduce_in_backward=flag)
        _passes(operation, x[rank], grad, (x.sum(0), grad))


def _share(whole: torch.Tensor, part: torch.Tensor, rank: int) -> None:
    """Copies this rank's part of a whole parameter."""
    dims = [i for i in range(whole.ndim) if whole.shape[i] != part.shape[i]]
    with torch.no_grad():
        part.copy_(whole.chunk(2, dims[0])[rank] if dims else whole)


def _close(one: torch.Tensor, other: torch.Tensor, bound: float) -> None:
    error = (one - other).norm() / other.norm()
    assert error <= bound, f"relative error {float(error)}"


def _compared(
    rank: int,
    whole: ops.Sequential,
    shared: ops.Sequential,
    sequence: bool,
    fp8: bool,
    bound: float,
) -> None:
    """Compares results and all gradients of a Sequential on two ranks with those on one."""
    for part, other in zip(shared.parameters(), whole.parameters(), strict=True):
        _share(other, part, rank)
    x, upstream = _drawn(ROWS, HIDDEN).requires_grad_(), _drawn(ROWS, HIDDEN)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[rank] if sequence else tensor

    leaf = own(x.detach()).clone().requires_grad_()
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        out, expected = shared(leaf), whole(x)
    out.backward(own(upstream))
    expected.backward(upstream)
    assert leaf.grad is not None and x.grad is not None
    _close(out, own(expected), bound)
    _close(leaf.grad, own(x.grad), bound)
    for part, other in zip(shared.parameters(), whole.parameters(), strict=True):
        grad, want = part.grad, other.grad
        assert grad is not None and want is not None
        if grad.shape != want.shape:
            dim = next(i for i in range(want.ndim) if want.shape[i] != grad.shape[i])
            want = want.chunk(2, dim)[rank]
        elif sequence:  # trainers sum these: of norms, and of biases after a reduce-scatter
            dist.all_reduce(grad)
        _close(grad, want, bound)


def _linears(make: Callable[..., Any], sequence: bool, fp8: bool) -> Callable[[int], None]:
    """Column-parallel layer, GELU, row-parallel layer, which communicate inside."""

    def run(rank: int) -> None:
        def made(**first_and_second: Any) -> ops.Sequential:
            first, second = [
                {"tensor_parallel_mode": mode, "sequence_parallel": sequence}
                | {"tensor_parallel_group": dist.group.WORLD}
                if first_and_second
                else {}
                for mode in ("column", "row")
            ]
            device: Any = here()
            return ops.Sequential(
                make(HIDDEN, FFN, device=device, **first),
                ops.GELU(),
                make(FFN, HIDDEN, device=device, **second),
            )

        bound = PRECISIONS["fp8" if fp8 else "fp32"][1]
        _compared(rank, made(), made(shared=True), sequence, fp8, bound)

    return run


def _mlp(sequence: bool, fp8: bool) -> Callable[[int], None]:
    """An MLP as Megatron-Core builds it: the collective after the second GEMM is an operation."""

    def run(rank: int) -> None:
        device: Any = here()
        group = dist.group.WORLD

        def made(ranks: int) -> ops.Sequential:
            column = {"tensor_parallel_mode": "column", "tensor_parallel_group": group}
            collective = ops.ReduceScatter(group) if sequence else ops.AllReduce(group)
            return ops.Sequential(
                ops.LayerNorm(HIDDEN, device=device),
                ops.BasicLinear(
                    HIDDEN,
                    FFN,
                    device=device,
                    sequence_parallel=sequence,
                    **(column if ranks > 1 else {}),
                ),
                ops.Bias(
                    FFN, device=device, tensor_parallel=ranks > 1, tensor_parallel_group=group
                ),
                ops.GELU(),
                ops.BasicLinear(FFN // ranks, HIDDEN, device=device),
                collective if ranks > 1 else ops.Identity(),
                ops.Bias(HIDDEN, device=device),
            )

        bound = PRECISIONS["fp8" if fp8 else "fp32"][1]
        _compared(rank, made(1), made(2), sequence, fp8, bound)

    return run


def norm_of_a_shared_bias(rank: int) -> None:
    """It has the gradients of both ranks' parts."""
    device: Any = here()
    shared = {"tensor_parallel": True, "tensor_parallel_group": dist.group.WORLD}
    bias = ops.Bias(4, device=device, **shared).bias
    bias.grad = torch.full_like(bias, 3.0 + rank)
    norm, _ = clip_factor([bias], 1.0, dist.group.WORLD)
    torch.testing.assert_close(norm.item(), (2 * 3.0**2 + 2 * 4.0**2) ** 0.5)


SCENARIOS: dict[str, Callable[[int], None]] = {
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-reduce": all_reduce,
    "norm of a shared bias": norm_of_a_shared_bias,
}
for _precision, (_fp8, _) in PRECISIONS.items():
    for _sequence in (False, True):
        _what = f"{'sequence' if _sequence else 'tensor'} parallel, {_precision}"
        SCENARIOS[f"BasicLinear, {_what}"] = _linears(ops.BasicLinear, _sequence, _fp8)
        SCENARIOS[f"Linear, {_what}"] = _linears(ops.Linear, _sequence, _fp8)
        SCENARIOS[f"collective, {_what}"] = _mlp(_sequence, _fp8)


def outcomes(rank: int) -> dict[str, str]:
    """Returns the traceback of each failed scenario on a rank, "" where it passed."""
    torch.manual_seed(0)
    return failures(SCENARIOS, rank)
