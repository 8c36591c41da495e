"""Scenarios of options of tensor-parallel layers, as in `tensor_parallel_scenarios.py`.

Each result is compared with the same layer without the option, bit for bit where both round alike.
"""

import copy
import io
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from sizes import as_large_inputs
from tensor_parallel_ranks import BOUNDS, RECIPES, difference, scope

import transformer_engine.pytorch as te
from transformer_engine.pytorch.chain.chain import Chain

LAYERS = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp")
PRECISIONS = ("bf16", "delayed", "current", "block")


def _layer(sequence: bool = True, **more: Any) -> te.TransformerLayer:
    torch.manual_seed(11)
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    options |= {"set_parallel_mode": True, "sequence_parallel": sequence, "fuse_qkv_params": True}
    options |= {"params_dtype": torch.bfloat16, "tp_group": dist.group.WORLD}
    return te.TransformerLayer(64, 128, 4, **{**options, **more})


def _input(sequence: bool = True) -> torch.Tensor:
    x = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    return (x.chunk(2)[dist.get_rank()] if sequence else x).clone().requires_grad_()


def _backward(layer: Any, x: torch.Tensor, precision: str, **more: Any) -> torch.Tensor:
    """Returns the gradient of the input."""
    with scope(precision):
        y = layer(x, **more)
    y.backward(torch.ones_like(y) * 0.01)
    return x.grad


def _gradients(layer: Any) -> list[torch.Tensor]:
    grads = [p.grad if p.grad is not None else p.main_grad for p in layer.parameters()]
    return [grad.clone() for grad in grads]


def _step(layer: Any, x: torch.Tensor, precision: str, **more: Any) -> list[torch.Tensor]:
    """Returns output and gradients."""
    with scope(precision):
        y = layer(x, **more)
    y.backward(torch.ones_like(y) * 0.01)
    return [y.detach(), x.grad, *_gradients(layer)]


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all([torch.equal(a, b.to(a.dtype)) for a, b in pairs])


def weight_gradients_in_main_grad(rank: int) -> None:
    """`main_grad` gets the gradients that `grad` gets, from recordings and stage by stage."""
    for precision in PRECISIONS:
        for large in (False, True):
            with as_large_inputs(large):
                plain, fused = _layer(), _layer(fuse_wgrad_accumulation=True)
                for parameter in fused.parameters():
                    if parameter.dim() == 2:
                        parameter.main_grad = torch.zeros_like(parameter)
                assert _equal(_step(plain, _input(), precision), _step(fused, _input(), precision))


def delayed_gradients(rank: int) -> None:
    """`backward_dw` gives the weight gradients of an undelayed backward, recorded or not."""
    shared: dict[str, Any] = {"tp_group": dist.group.WORLD, "params_dtype": torch.bfloat16}
    kinds: dict[str, Any] = {
        "mlp": lambda **more: te.LayerNormMLP(64, 128, set_parallel_mode=True, **more),
        "column": lambda **more: te.LayerNormLinear(64, 64, parallel_mode="column", **more),
    }
    for precision in PRECISIONS:
        for large in (False, True):
            with as_large_inputs(large):
                for name, make in kinds.items():
                    for sequence in (False, True):
                        options = {**shared, "sequence_parallel": sequence, "device": "cpu"}
                        torch.manual_seed(11)
                        plain = make(**options)
                        late = make(**options, delay_wgrad_compute=True)
                        late.load_state_dict(plain.state_dict())
                        own = _backward(late, _input(sequence), precision)
                        late.backward_dw()
                        other = _backward(plain, _input(sequence), precision)
                        own, other = [own, *_gradients(late)], [other, *_gradients(plain)]
                        assert _equal(own, other), (name, precision, sequence)


def grouped_layers(rank: int) -> None:
    """Grouped layers shard each weight, and leave sums and gathers to the caller."""
    splits, x = [32, 0, 16], torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    for precision in PRECISIONS:
        for mode in ("column", "row"):
            dim, bias = int(mode == "row"), mode == "column"
            options: dict[str, Any] = {"params_dtype": torch.bfloat16, "parallel_mode": mode}
            options |= {"device": "cpu", "bias": bias, "sequence_parallel": True}
            torch.manual_seed(4)
            whole = te.GroupedLinear(3, 64, 96, **options)
            torch.manual_seed(4)
            own = te.GroupedLinear(3, 64, 96, **options, tp_size=2, delay_wgrad_compute=True)
            own.set_tensor_parallel_group(dist.group.WORLD)
            with torch.no_grad():
                for name, part in own.named_parameters():
                    part.copy_(getattr(whole, name).chunk(2, dim)[rank])
            first, second = x.bfloat16().requires_grad_(), x.bfloat16()
            second = (second.chunk(2, 1)[rank] if dim else second).clone().requires_grad_()
            te.parallel_report(reset=True)
            with scope(precision):
                y, part = whole(first, splits), own(second, splits)
            part = part.float()  # trainers sum the parts of row-parallel layers
            if dim:
                dist.all_reduce(part)
            y.float().square().sum().backward()
            upstream = 2 * (y.detach().float() if dim else y.detach().float().chunk(2, 1)[rank])
            part.backward(upstream)
            own.backward_dw()
            grad = second.grad.float()
            if not dim:
                dist.all_reduce(grad)
            assert not te.parallel_report().bytes()
            apart = BOUNDS[precision]
            expected = y.detach() if dim else y.detach().chunk(2, 1)[rank]
            assert difference(part, expected) < apart, (precision, mode)
            of_input = first.grad.chunk(2, 1)[rank] if dim else first.grad
            assert difference(grad, of_input) < apart, (precision, mode)
            for name, parameter in own.named_parameters():
                piece = getattr(whole, name).grad.chunk(2, dim)[rank]
                assert difference(parameter.grad, piece) < apart, (precision, mode, name)
    options = {"parallel_mode": "row", "tp_group": dist.group.WORLD, "name": "experts"}
    try:
        te.GroupedLinear(3, 64, 96, **options)
    except ValueError as error:
        assert "bias=False or return_bias=True" in str(error) and "(layer experts.gemm_0)" in str(
            error
        )
    else:
        raise AssertionError("nothing was raised")


def micro_batches(rank: int) -> None:
    """Later micro-batches use the FP8 weight that the first has cached."""
    for precision in PRECISIONS:
        plain, cached = _layer(), _layer()
        for first in (True, False, False):
            plain.zero_grad()
            cached.zero_grad()
            own = _step(cached, _input(), precision, is_first_microbatch=first)
            other = _step(plain, _input(), precision)
            if precision == "delayed":  # plain casts weights with the scale of each step
                assert difference(own[0], other[0]) < 0.05
            else:
                assert _equal(other, own), (precision, first)


def weights_in_fp8(rank: int) -> None:
    """FP8 weights are sharded, and the layer computes what it does with weights that it casts."""
    for precision in PRECISIONS[1:]:
        plain = _layer()
        with te.fp8_model_init(recipe=RECIPES[precision]):
            layer = _layer()
        own, other = _step(layer, _input(), precision), _step(plain, _input(), precision)
        assert difference(own[0], other[0]) < 0.05, precision
        assert difference(own[1], other[1]) < 0.1, precision


def recomputed_layers(rank: int) -> None:
    """Recomputed layers give the same bits, with sharded activations saved."""
    for precision in PRECISIONS:
        for sequence in (False, True):
            plain, layer = _layer(sequence), _layer(sequence)
            more: dict[str, Any] = {"tp_group": dist.group.WORLD}
            more["distribute_saved_activations"] = not sequence

            def checkpointed(x: torch.Tensor) -> torch.Tensor:
                return te.checkpoint(layer, x, **more)  # noqa: B023

            checkpointed.parameters = layer.parameters  # type: ignore[attr-defined]
            own = _step(checkpointed, _input(sequence), precision)
            assert _equal(_step(plain, _input(sequence), precision), own), (precision, sequence)


def recomputed_mlps(rank: int) -> None:
    """Recomputed MLPs give the same bits, with and without sequence parallelism."""
    for precision in PRECISIONS:
        for sequence in (False, True):
            found = []
            for checkpoint in (False, True):
                layer = _mlp(sequence)
                layer.checkpoint = checkpoint
                steps = [_step(layer, _input(sequence), precision) for _ in range(2)]
                found.append([t for step in steps for t in step])
            assert _equal(*found), (precision, sequence)


def recomputed_calls_that_are_not_recorded(rank: int) -> None:
    """A recompute saves what its first forward did, whether that ran from a recording or not."""
    for sequence in (False, True):
        for offset, autocast in ((0, True), (1, False), (1, True)):
            found = []
            for run in (te.checkpoint, torch.utils.checkpoint.checkpoint, lambda f, x, **_: f(x)):
                layer, x = _mlp(sequence).float(), _input(sequence).detach().float()
                memory = torch.empty(x.numel() + offset)[offset:]  # aligned to 16 bytes, or to 4
                x = memory.view_as(x).copy_(x).requires_grad_()
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        y = run(layer, x, use_reentrant=False)
                    y.backward(torch.ones_like(y) * 0.01)
                found.append([y.detach(), x.grad, *_gradients(layer)])
            assert _equal(found[0], found[2]) and _equal(found[1], found[2]), (offset, autocast)


def recomputes_around_refused_recordings(rank: int) -> None:
    """A recompute saves what its first forward did, also if a recording was refused in between."""
    for precision in PRECISIONS[:3]:

        def call(layer: Any, tokens: int, offset: int, recomputes: bool) -> torch.Tensor:
            x = torch.ones(tokens * 64 + offset, dtype=torch.bfloat16)[offset:]
            x = x.view(tokens, 64).requires_grad_()
            with scope(precision):  # noqa: B023
                return te.checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)

        layer = _mlp(False)
        call(layer, 32, 1, recomputes=False)
        call(layer, 32, 0, recomputes=True).sum().backward()
        layer = _mlp(False)
        first = call(layer, 32, 0, recomputes=True)
        call(layer, 16, 1, recomputes=False)
        second = call(layer, 32, 0, recomputes=True)
        second.sum().backward()
        first.sum().backward()


def recomputes_of_many_shapes(rank: int) -> None:
    """A recompute saves what its first forward did: the one is recorded if the other was."""
    layer = _mlp(False)
    with patch.object(Chain, "most_shapes", 1), scope(PRECISIONS[2]):
        layer(torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True))
        for tokens in (32, 16):
            x = torch.ones(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
            te.checkpoint(layer, x, use_reentrant=False).sum().backward()


def joined_with_a_bias_under_autocast(rank: int) -> None:
    """Under `torch.autocast`, collectives that add a bias are recorded with their layer, too."""
    for sequence in (False, True):
        layer = _mlp(sequence).float()
        with torch.autocast("cpu", torch.bfloat16):
            layer(_input(sequence))
        (plan,) = layer._plans.values()
        ((segment,),) = plan.recordings.values()
        assert segment.joined and segment.recorded is not None, segment.refused


def stage_by_stage_and_recorded(rank: int) -> None:
    """Recorded runs and runs stage by stage give the same bits."""
    for precision in PRECISIONS:
        for sequence in (False, True):
            recorded = _step(_layer(sequence), _input(sequence), precision)
            with as_large_inputs():
                assert _equal(recorded, _step(_layer(sequence), _input(sequence), precision))


def _shared(sequence: bool) -> dict[str, Any]:
    """Returns options of a module that ranks share."""
    options: dict[str, Any] = {"set_parallel_mode": True, "sequence_parallel": sequence}
    return options | {
        "tp_group": dist.group.WORLD,
        "params_dtype": torch.bfloat16,
        "device": "cpu",
    }


def _mlp(sequence: bool) -> te.LayerNormMLP:
    torch.manual_seed(11)
    return te.LayerNormMLP(64, 128, **_shared(sequence))


def _attention(sequence: bool) -> te.MultiheadAttention:
    torch.manual_seed(11)
    options = {"attention_dropout": 0.0, "input_layernorm": True, **_shared(sequence)}
    return te.MultiheadAttention(64, 4, **options)


def compiled_layers(rank: int) -> None:
    """Compiled layers compute what eager ones do, in two steps of one graph.

    An attention module and an MLP stand for a whole layer, because each takes seconds to compile.
    """
    cases = ((_attention, True, "current"), (_mlp, True, "delayed"), (_mlp, False, "bf16"))
    for make, sequence, precision in cases:
        torch._dynamo.reset()
        layer, group = make(sequence), dist.new_group([0, 1])
        layer.set_tensor_parallel_group(group)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        found = _step(run, _input(sequence), precision)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found += _step(run, _input(sequence), precision)
        plain = make(sequence)
        expected = [x for _ in range(2) for x in _step(plain, _input(sequence), precision)]
        for own, other in zip(found, expected, strict=True):
            assert difference(own, other) < (0.02 if precision == "bf16" else 0.1)


def copies(rank: int) -> None:
    """A deep copy keeps the group; a loaded layer gets its group set again."""
    layer = _layer()
    first = _step(layer, _input(), "bf16")
    layer.zero_grad()
    assert _equal(first, _step(copy.deepcopy(layer), _input(), "bf16"))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.set_tensor_parallel_group(dist.group.WORLD)
    assert _equal(first, _step(loaded, _input(), "bf16"))


def dropout_inside_and_outside(rank: int) -> None:
    """Dropout draws different numbers for the heads of each rank, equal ones outside.

    Attention uses the tracker's seed of each rank. Hidden dropout acts on values that all ranks
    have.
    """
    tracker = te.CudaRNGStatesTracker("cpu")
    tracker.add("model-parallel-rng", 100 + rank)
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "tp_size": 2}
    attention = te.DotProductAttention(
        4, 16, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker, **options
    )
    torch.manual_seed(3)
    q = torch.randn(16, 2, 2, 16)
    own = attention(q, q, q)
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    assert not torch.equal(*others)
    more: dict[str, Any] = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    layer = _layer(False, **more, get_rng_state_tracker=lambda: tracker)
    torch.manual_seed(3)
    y = layer(_input(False)).detach()
    outputs = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(outputs, y)
    assert torch.equal(*outputs)


def report_of_what_was_sent(rank: int) -> None:
    """The report counts collectives and bytes; FP8 gathers have half the bytes of bf16."""
    sizes = {}
    for precision in ("bf16", "delayed"):
        te.parallel_report(reset=True)
        with as_large_inputs():
            _step(_layer(name="layer"), _input(), precision)
        report = te.parallel_report(reset=True)
        found = {(s.collective, s.direction): n for s, (n, _) in report.counts.items()}
        assert found[("reduce-scatter", "forward")] == 1, found  # one per layer
        per_layer = {sent.layer for sent in report.counts}
        assert per_layer == {f"layer.{part}" for part in LAYERS}, per_layer
        sizes[precision] = report
    shard = _input().nbytes
    bf16, fp8 = sizes["bf16"], sizes["delayed"]
    gathers = 2 * 3  # inputs of QKV and FC1 (twice each), gradients of PROJ's and FC2's output
    assert bf16.bytes() == (gathers + 8) * shard, bf16.bytes() / shard
    assert fp8.bytes("fp8") == gathers * shard // 2
    assert fp8.bytes("bfloat16") == 8 * shard  # four reduce-scatters of the tokens of two ranks
    assert "under a GEMM" in str(fp8), str(fp8)
    _step(_layer(name="layer"), _input(), "delayed")
    small = te.parallel_report()
    assert small.bytes() == fp8.bytes() and "under a GEMM" not in str(small), str(small)


OPTIONS = (
    report_of_what_was_sent,
    weight_gradients_in_main_grad,
    delayed_gradients,
    grouped_layers,
    micro_batches,
    weights_in_fp8,
    recomputed_layers,
    recomputed_mlps,
    recomputed_calls_that_are_not_recorded,
    recomputes_around_refused_recordings,
    recomputes_of_many_shapes,
    joined_with_a_bias_under_autocast,
    stage_by_stage_and_recorded,
    compiled_layers,
    copies,
    dropout_inside_and_outside,
)
