"""Scenarios that change settings of tensor-parallel layers after construction."""

from typing import Any

import torch
import torch.distributed as dist
from tensor_parallel_ranks import CPU, difference, raised, scope
from torch.nn.functional import linear

import transformer_engine.pytorch as te

_KINDS: dict[str, Any] = {
    "column": (te.Linear, {"parallel_mode": "column"}),
    "row": (te.Linear, {"parallel_mode": "row"}),
    "norm": (te.LayerNormLinear, {"parallel_mode": "column"}),
    "mlp": (te.LayerNormMLP, {"set_parallel_mode": True}),
    "layer": (
        te.TransformerLayer,
        {
            "num_attention_heads": 4,
            "set_parallel_mode": True,
            "output_layernorm": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
}


def _made(kind: str, sequence: bool) -> Any:
    torch.manual_seed(5)
    module, mode = _KINDS[kind]
    options = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, **mode, **CPU}
    return module(32, 64, name="fc", **options)


def _step(module: Any, x: torch.Tensor, precision: str) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    with scope(precision):
        y = module(x)
    (y * y).sum().backward()
    te.all_reduce_sequence_parallel_grads(module)
    return [y, x.grad, *[p.grad for p in module.parameters()]]  # type: ignore[list-item]


def _input(kind: str, sequence: bool) -> torch.Tensor:
    tokens = 32 if sequence and kind != "row" else 64
    sizes = {"row": (16,), "layer": (2, 32)}
    return torch.randn(tokens, *sizes.get(kind, (32,)))


def sequence_parallelism_that_is_set(rank: int) -> None:
    """A layer whose `sequence_parallel` is set later equals a layer that was made with it."""
    for kind in _KINDS:
        for precision in ("fp32", "delayed", "current"):
            late = _made(kind, True)
            _step(late, _input(kind, True), precision)
            for sequence in (False, True):
                made = _made(kind, sequence)
                made.load_state_dict(late.state_dict())
                late.sequence_parallel = sequence
                inside = late.layernorm_mlp if kind == "layer" else late
                assert late.sequence_parallel is inside.ranks.sequence is sequence
                x = _input(kind, sequence)
                found, expected = _step(late, x, precision), _step(made, x, precision)
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a, b), (kind, precision, sequence)
    alone = te.Linear(32, 64, **CPU)
    alone.sequence_parallel = True
    assert alone.sequence_parallel is False
    grouped = te.GroupedLinear(2, 32, 64, tp_group=dist.group.WORLD, parallel_mode="column", **CPU)
    grouped.sequence_parallel = True
    assert all([part.ranks.sequence for part in (grouped, *grouped.parts())])


def parallel_modes_that_are_set(rank: int) -> None:
    """Without a parallel mode, a layer multiplies its local input by its local weight."""
    for kind in ("column", "row", "norm"):
        layer = _made(kind, True)
        x = torch.randn(32, layer.in_features)
        layer(_input(kind, True))
        layer.parallel_mode = None
        expected = linear(x, layer.weight, layer.bias)
        if kind == "norm":
            expected = linear(torch.nn.functional.layer_norm(x, (32,)), layer.weight, layer.bias)
        assert difference(layer(x), expected) < 1e-6, kind
        shared = _made(kind, True)
        shared.load_state_dict(layer.state_dict())
        layer.parallel_mode = "Row" if kind == "row" else "COLUMN"
        x = _input(kind, True)
        assert torch.equal(layer(x), shared(x)), kind
    norm = _made("norm", True)
    message = raised(NotImplementedError, lambda: setattr(norm, "parallel_mode", "row"))
    assert "got 'row'" in message and norm.parallel_mode == "column", message
    message = raised(ValueError, lambda: setattr(norm, "parallel_mode", "rows"))
    assert "'rows' not supported" in message, message


def overlap_behind_settings(rank: int) -> None:
    """Overlap is what the arguments asked for, as long as sequence parallelism is on."""
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "parallel_mode": "column", **CPU}
    layer = te.Linear(32, 64, sequence_parallel=True, ub_overlap_ag=True, ub_name="fc1", **options)
    assert layer.ub_overlap_ag_fprop and layer.ranks.overlap.gather
    assert not layer.ub_overlap_ag_dgrad
    layer.sequence_parallel = False
    assert not any(layer.ranks.overlap)
    layer.sequence_parallel = True
    assert layer.ranks.overlap.gather
    layer.parallel_mode = None
    assert not any(layer.ranks.overlap)
    unnamed = te.Linear(32, 64, ub_overlap_ag=True, **options)
    message = raised(ValueError, lambda: setattr(unnamed, "sequence_parallel", True))
    assert "expected ub_name" in message and not unnamed.sequence_parallel, message
    assert unnamed(torch.ones(16, 32)).shape == (16, 32)


def taps_that_are_set(rank: int) -> None:
    """The norm's output that a layer returns is that of this rank's tokens, or of all."""
    for kind in ("norm", "mlp"):
        layer, x = _made(kind, True), torch.randn(64, 32)
        own = x.chunk(2)[rank]
        layer(own)
        layer.return_layernorm_output_gathered = True
        assert isinstance(layer(own), torch.Tensor)
        layer.return_layernorm_output = True
        expected = torch.nn.functional.layer_norm(x, (32,))
        gathered = layer(own)[1]
        assert gathered.shape == (64, 32)
        layer.return_layernorm_output_gathered = False
        assert difference(layer(own)[1], expected.chunk(2)[rank]) < 1e-6
        assert difference(gathered.chunk(2)[rank], expected.chunk(2)[rank]) < 1e-6


SETTINGS = (
    sequence_parallelism_that_is_set,
    parallel_modes_that_are_set,
    overlap_behind_settings,
    taps_that_are_set,
)
