"""Compares modules that ranks share with the same module in one process.

`matrix` runs forward and backward of every module in `MODULES`, with and without sequence
parallelism, in every precision. Results and gradients of a rank are compared with that rank's part
of the tensors of one process.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 128, 8, 32, 2
STEPS = 2

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
PRECISIONS = ("fp32", "bf16", "fp16", *RECIPES)
# Bounds of `difference` for one GEMM. Sums over ranks are rounded once more to the dtype of
# activations (2^-9 in bf16). Under current scaling, shards of a weight, and of the input of a
# row-parallel layer, have a scale each: all of their codes differ, by half a code.
BOUNDS = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 1.5e-3}
BOUNDS |= {"delayed": 1e-2, "current": 0.15, "block": 1e-2}
# Bounds for several GEMMs in sequence. Values that were rounded differently before may be cast to
# neighbouring codes, which are 2^-4 apart.
LAYER_BOUNDS = {"fp32": 2e-6, "bf16": 2e-2, "fp16": 3e-3}
LAYER_BOUNDS |= {"delayed": 0.15, "current": 0.2, "block": 0.1}


class Shared(NamedTuple):
    """A module that ranks share.

    Attributes:
        make: the constructor; called with the arguments of tensor parallelism, or without.
        columns: the input is that of a column-parallel GEMM; otherwise its features are sharded.
        rows: the output is that of a row-parallel GEMM; otherwise its features are sharded.
        halves: names of parameters of two halves, each of which is sharded.
        outputs: if the output is sharded, the sizes of its sections, each of which is sharded.
    """

    make: Callable[..., Any]
    columns: bool = True
    rows: bool = True
    halves: tuple[str, ...] = ()
    outputs: tuple[int, ...] = (96,)


def _made(kind: Any, *sizes: int, **more: Any) -> Callable[..., Any]:
    return lambda **arguments: kind(*sizes, **more, **arguments)


_MODE = {"set_parallel_mode": True}
_LAYER: dict[str, Any] = {**_MODE, "hidden_dropout": 0.0, "attention_dropout": 0.0}
_ATTENTION: dict[str, Any] = {**_MODE, "attention_dropout": 0.0}
_SPLIT = {"a_": 48, "b_": 16, "c_": 32}
MODULES = {
    "column": Shared(_made(te.Linear, HIDDEN, 96, parallel_mode="column"), rows=False),
    "column split": Shared(
        _made(te.Linear, HIDDEN, 96, parallel_mode="Column", parameters_split=_SPLIT),
        rows=False,
        outputs=(48, 16, 32),
    ),
    "row": Shared(_made(te.Linear, HIDDEN, 96, parallel_mode="row"), columns=False),
    "row, no bias": Shared(
        _made(te.Linear, HIDDEN, 96, parallel_mode="row", bias=False), columns=False
    ),
    "norm column": Shared(
        _made(te.LayerNormLinear, HIDDEN, 96, parallel_mode="column"), rows=False
    ),
    "mlp": Shared(_made(te.LayerNormMLP, HIDDEN, FFN, **_MODE)),
    "mlp swiglu": Shared(
        _made(te.LayerNormMLP, HIDDEN, FFN, **_MODE, activation="swiglu", normalization="RMSNorm"),
        halves=("fc1_weight", "fc1_bias"),
    ),
    "attention": Shared(_made(te.MultiheadAttention, HIDDEN, HEADS, **_ATTENTION)),
    "attention, norms of heads": Shared(
        _made(te.MultiheadAttention, HIDDEN, HEADS, qk_norm_type="RMSNorm", **_ATTENTION)
    ),
    "attention, groups": Shared(
        _made(
            te.MultiheadAttention,
            HIDDEN,
            HEADS,
            num_gqa_groups=4,
            input_layernorm=True,
            fuse_qkv_params=True,
            **_ATTENTION,
        )
    ),
    "layer": Shared(_made(te.TransformerLayer, HIDDEN, FFN, HEADS, **_LAYER, fuse_qkv_params=True)),
    "layer, post norm": Shared(
        _made(te.TransformerLayer, HIDDEN, FFN, HEADS, **_LAYER, output_layernorm=True)
    ),
    "layer, parallel blocks": Shared(
        _made(te.TransformerLayer, HIDDEN, FFN, HEADS, **_LAYER, parallel_attention_mlp=True)
    ),
}


def scope(precision: str) -> AbstractContextManager[Any]:
    """Returns the context that modules run in."""
    if precision in RECIPES:
        return te.fp8_autocast(fp8_recipe=RECIPES[precision], fp8_group=dist.group.WORLD)
    return nullcontext()


def part(name: str, parameter: Any, whole: torch.Tensor, shared: Shared) -> torch.Tensor:
    """Returns this rank's part of a whole parameter (or of its gradient)."""
    if parameter.shape == whole.shape:
        return whole
    dim = parameter.partition_dim
    sections = whole.chunk(2 if name in shared.halves else 1, dim)
    rank, size = dist.get_rank(), dist.get_world_size()
    return torch.cat([section.chunk(size, dim)[rank] for section in sections], dim)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference, relative to the norm of `expected`."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-6))


def pair(shared: Shared, sequence: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the module on all ranks and the module in one process, with equal parameters."""
    options: dict[str, Any] = {"params_dtype": dtype, "device": here()}
    torch.manual_seed(1)
    alone = shared.make(**options)
    group = dist.group.WORLD
    parallel = shared.make(**options, tp_group=group, sequence_parallel=sequence)
    with torch.no_grad():
        for (name, own), whole in zip(parallel.named_parameters(), alone.parameters(), strict=True):
            if own.dim() == 1:
                whole.normal_(1.0, 0.2)
            else:  # large enough that attention scores tell keys apart
                whole.normal_(0.0, HIDDEN**-0.5)
            own.copy_(part(name, own, whole, shared))
    return parallel, alone


def _piece(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def run_step(
    shared: Shared, sequence: bool, modules: tuple[Any, Any], precision: str, seed: int
) -> Iterator[tuple[str, float]]:
    """Runs forward and backward of both modules; yields the difference of each tensor."""
    parallel, alone = modules
    dtype = DTYPES.get(precision, torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    tokens = 128 if precision == "block" else TOKENS  # whole blocks on each of two ranks
    x = torch.randn(tokens, BATCH, HIDDEN, generator=generator).to(here(), dtype)
    whole = x.clone().requires_grad_()
    with scope(precision):
        y = alone(whole)
    grad = torch.randn(y.shape, generator=generator).to(here(), dtype)
    y.backward(grad)

    def of_output(t: torch.Tensor) -> torch.Tensor:
        if not shared.rows:
            return torch.cat([_piece(part, -1) for part in t.split(shared.outputs, -1)], -1)
        return _piece(t, 0) if sequence else t

    def of_input(t: torch.Tensor) -> torch.Tensor:
        if not shared.columns:
            return _piece(t, -1)
        return _piece(t, 0) if sequence else t

    own = of_input(x).clone().requires_grad_()
    with scope(precision):
        result = parallel(own)
    result.backward(of_output(grad))
    yield "output", difference(result, of_output(y))
    yield "input grad", difference(own.grad, of_input(whole.grad))
    te.all_reduce_sequence_parallel_grads(parallel)
    for (name, p), q in zip(parallel.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None, name
        if "key_bias" not in name:  # softmax ignores it, so its gradient is rounding error
            yield f"{name} grad", difference(p.grad, part(name, p, q.grad, shared))
    parallel.zero_grad()
    alone.zero_grad()


def scales_apart(parallel: torch.nn.Module, alone: torch.nn.Module) -> float:
    """Returns the largest relative difference of the scales of delayed scaling."""
    found = 0.0
    for ours, theirs in zip(parallel.modules(), alone.modules(), strict=True):
        for direction, state in getattr(ours, "scaling", {}).items():
            other = theirs.scaling[direction].scale
            found = max(found, float(((state.scale - other) / other).abs().max()))
    return found


def compare(name: str, sequence: bool, precision: str) -> dict[str, float]:
    """Returns the largest difference of each tensor over some steps."""
    shared = MODULES[name]
    modules = pair(shared, sequence, DTYPES.get(precision, torch.bfloat16))
    found: dict[str, float] = {}
    for seed in range(STEPS):
        for tensor, apart in run_step(shared, sequence, modules, precision, seed):
            found[tensor] = max(apart, found.get(tensor, 0.0))
    if precision == "delayed":
        found["scales"] = scales_apart(*modules)
    return found


Case = tuple[str, bool, str]


def bound(case: Case, backend: str) -> float:
    """Returns the bound for all differences of a case.

    In fp32, GPU kernels sum in another order for other sizes, and the backward of a norm at the end
    of a layer cancels most of the incoming gradient.
    """
    if backend == "nccl" and case[-1] == "fp32":
        return 5e-4
    is_one = not MODULES[case[0]].columns or not MODULES[case[0]].rows
    return (BOUNDS if is_one else LAYER_BOUNDS)[case[-1]]


def cases(ranks: int) -> list[Case]:
    """Returns the cases: all of them on two ranks, "layer" only on more.

    Without a GPU, other modules than "layer" run half of the pairs of precision and sequence
    parallelism, such that each precision occurs once.
    """
    return [
        (name, sequence, precision)
        for i, name in enumerate(MODULES)
        for sequence in (False, True)
        for j, precision in enumerate(PRECISIONS)
        if (name == "layer" and (ranks == 2 or precision in ("fp32", "delayed")))
        or (ranks == 2 and (torch.cuda.is_available() or sequence == (i + j) % 2))
    ]


def matrix(rank: int, which: list[Case]) -> dict[Case, Any]:
    """Returns `compare` of each case."""
    return {case: compare(*case) for case in which}


CPU = {"device": "cpu"}


def raised(error: type[Exception], call: Callable[[], Any]) -> str:
    """Returns the message of an error."""
    try:
        call()
    except error as raised:
        return str(raised)
    return "nothing was raised"


def column_and_row(**more: Any) -> list[te.Linear]:
    """Returns a column-parallel and a row-parallel layer, with sequence parallelism."""
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "sequence_parallel": True, **CPU}
    options |= {"params_dtype": torch.bfloat16, **more}
    return [te.Linear(64, 64, parallel_mode=mode, **options) for mode in ("column", "row")]
