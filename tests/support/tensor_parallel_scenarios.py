"""Scenarios of tests/distributed/test_tensor_parallel that go beyond the matrix of cases.

A scenario raises an error if it finds something wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from attempts import failures
from peer_messages import in_parts as passing_in_parts
from sizes import as_large_inputs
from tensor_parallel_backward import backwards_in_high_precision
from tensor_parallel_options import OPTIONS
from tensor_parallel_overlap import overlap_on_request
from tensor_parallel_ranks import CPU, column_and_row, difference, raised, scope
from tensor_parallel_settings import SETTINGS

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.chain import gemm
from transformer_engine.pytorch.parallel import collectives, one_shot
from transformer_engine.pytorch.parallel.one_shot import one_shot_of
from transformer_engine.pytorch.parallel.overlap import Overlap


def groups_that_do_not_fit(rank: int) -> None:
    """Groups that do not match `tp_size` raise errors; after the first forward, new groups do."""
    world, alone = dist.group.WORLD, [dist.new_group([0]), dist.new_group([1])][rank]
    message = raised(ValueError, lambda: te.Linear(32, 32, tp_group=world, tp_size=4, **CPU))
    assert "expected tp_group of tp_size=4 ranks, got one of 2" in message, message
    layer = te.Linear(32, 32, tp_size=2, parallel_mode="row", name="fc", **CPU)
    x = torch.ones(16, 16)
    message = raised(RuntimeError, lambda: layer(x))
    assert "TP group not initialized" in message and "(layer fc)" in message, message
    other = te.Linear(32, 32, parallel_mode="row", name="fc", **CPU)
    message = raised(ValueError, lambda: other.set_tensor_parallel_group(world))
    assert "expected a tp_group of tp_size=1 ranks, got one of 2 (layer fc)" in message, message
    layer.set_tensor_parallel_group(world)
    layer(x)
    layer.set_tensor_parallel_group(world)
    message = raised(ValueError, lambda: layer.set_tensor_parallel_group(alone))
    assert "before the first forward" in message, message


def tokens_that_do_not_divide(rank: int) -> None:
    """Tokens that ranks cannot share evenly raise an error on every rank, before any collective."""
    layer = te.Linear(
        32, 32, parallel_mode="row", sequence_parallel=True, tp_group=dist.group.WORLD, **CPU
    )
    message = raised(ValueError, lambda: layer(torch.ones(5, 16)))
    assert "first size can be divided by tp_size=2" in message, message


def gathered_output_of_the_norm(rank: int) -> None:
    """The gathered norm output has all tokens, and its gradient reaches each rank's tokens."""
    torch.manual_seed(3)
    x = torch.randn(8, 32)
    options: dict[str, Any] = {
        "return_layernorm_output": True,
        "return_layernorm_output_gathered": True,
        "parallel_mode": "column",
        **CPU,
    }
    alone = te.LayerNormLinear(32, 64, **options)
    shared = te.LayerNormLinear(
        32, 64, **options, tp_group=dist.group.WORLD, sequence_parallel=True
    )
    with torch.no_grad():
        shared.weight.copy_(alone.weight.chunk(2)[rank])
    whole, own = x.clone().requires_grad_(), x.chunk(2)[rank].clone().requires_grad_()
    (y, norm), (part, gathered) = alone(whole), shared(own)
    assert difference(gathered, norm) < 1e-6
    (y.sum() + 2 * norm.square().sum()).backward()
    (part.sum() + gathered.square().sum()).backward()  # on both ranks, so it counts twice
    assert difference(own.grad, whole.grad.chunk(2)[rank]) < 1e-5


def shards_of_one_seed(rank: int) -> None:
    """With one seed, shards are parts of the weight of one process, with a tracker or without."""

    def tracker() -> te.CudaRNGStatesTracker:
        return trackers[0]

    for get in (None, tracker):
        made = []
        for group in ({}, {"tp_group": dist.group.WORLD}):
            trackers = [te.CudaRNGStatesTracker("cpu")]
            trackers[0].add("model-parallel-rng", 5)
            torch.manual_seed(7)
            options: dict[str, Any] = {**group, "get_rng_state_tracker": get, **CPU}
            made.append(
                te.LayerNormMLP(32, 64, activation="swiglu", set_parallel_mode=True, **options)
            )
            made.append(te.Linear(32, 64, parallel_mode="row", **options))
        mlp, row, shared_mlp, shared_row = made
        assert torch.equal(shared_row.weight, row.weight.chunk(2, 1)[rank])
        gate, linear = mlp.fc1_weight.chunk(2)
        own = torch.cat([gate.chunk(2)[rank], linear.chunk(2)[rank]])
        assert torch.equal(shared_mlp.fc1_weight, own)
        assert torch.equal(shared_mlp.fc2_weight, mlp.fc2_weight.chunk(2, 1)[rank])


def draws_of_a_trainers_tracker(rank: int) -> None:
    """Other trackers draw shards: Megatron-Core seeds the tracker of each rank differently."""

    class Tracker(te.CudaRNGStatesTracker):
        pass

    tracker = Tracker("cpu")
    tracker.add("model-parallel-rng", 100 + rank)
    layer = te.Linear(
        32,
        64,
        parallel_mode="column",
        tp_group=dist.group.WORLD,
        get_rng_state_tracker=lambda: tracker,
        **CPU,
    )
    generator = torch.Generator().manual_seed(100 + rank)
    expected = torch.empty(32, 32).normal_(0.0, 0.023, generator=generator)
    assert torch.equal(layer.weight, expected)


def attributes_of_parameters(rank: int) -> None:
    """Parameters have the attributes that trainers read."""
    layer = te.TransformerLayer(
        32,
        64,
        4,
        set_parallel_mode=True,
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
        **CPU,
    )
    found = {}
    for name, parameter in layer.named_parameters():
        shared = getattr(parameter, "tensor_model_parallel", False)
        dim = getattr(parameter, "partition_dim", None)
        found[name.split(".", 1)[1]] = (shared, dim, getattr(parameter, "sequence_parallel", None))
    column, row, tokens = (True, 0, None), (True, 1, None), (False, None, True)
    expected = {"layernorm_qkv.layer_norm_weight": tokens, "layernorm_qkv.layer_norm_bias": tokens}
    for part in ("query", "key", "value"):
        for kind in ("weight", "bias"):
            expected[f"layernorm_qkv.{part}_{kind}"] = column
    expected |= {"proj.weight": row, "proj.bias": tokens}
    expected |= {"layer_norm_weight": tokens, "layer_norm_bias": tokens}
    expected |= {"fc1_weight": column, "fc1_bias": column, "fc2_weight": row, "fc2_bias": tokens}
    assert found == expected, found


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Records when collectives start, and the GEMMs between them."""
    events: list[str] = []
    places: list[tuple[Any, str]] = [(dist, "all_reduce"), (gemm, "dgrad"), (gemm, "wgrad")]
    places += [(collectives, "gather_into"), (collectives, "scatter_into")]
    found = [getattr(place, name) for place, name in places]

    def logging(name: str, call: Any) -> Any:
        def logged(*arguments: Any, **keywords: Any) -> Any:
            x = arguments[1] if "into" in name else arguments[0]
            dtype = x.dtype if isinstance(x, torch.Tensor) else ""
            events.append(f"{name} {dtype}".strip())
            return call(*arguments, **keywords)

        return logged

    for (place, name), call in zip(places, found, strict=True):
        setattr(place, name, logging(name, call))
    try:
        yield events
    finally:
        for (place, name), call in zip(places, found, strict=True):
            setattr(place, name, call)


def bytes_that_move(rank: int) -> None:
    """FP8 codes are sent for FP8 GEMMs: activations, and gradients of row-parallel layers."""
    for precision, amaxes in (("delayed", 0), ("current", 2), ("block", 0)):
        column, row = column_and_row()
        x = torch.randn(128, 64, dtype=torch.bfloat16).requires_grad_()
        with as_large_inputs(), _without_one_shot(), _logged() as events, scope(precision):
            y = row(column(x))
            y.sum().backward()
        gathers = [event for event in events if event.startswith("gather")]
        codes = [event for event in gathers if event.endswith("uint8")]
        assert len(codes) == (4 if precision == "block" else 3), (precision, events)
        assert not [event for event in gathers if event.endswith("bfloat16")], events
        maxima = [event for event in events if event == "all_reduce torch.float32"]
        updates = 2 if precision == "delayed" else 0  # one per direction for all modules
        assert len(maxima) == amaxes + updates, (precision, events)


def weight_gradients_under_collectives(rank: int) -> None:
    """The input's gather starts before dgrad, and the collective of dgrad's result before wgrad."""
    with as_large_inputs():
        column, _ = column_and_row()
        y = column(torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_())
        with _logged() as events:
            y.sum().backward()
        kinds = [event.split()[0] for event in events]
        assert kinds == ["gather_into", "dgrad", "scatter_into", "wgrad"], kinds


_PRECISIONS = ("bf16", "delayed", "current", "block")


def _trained(
    precision: str, sequence: bool, steps: int, in_parts: bool = False, tokens: int = 128
) -> tuple[Any, list[torch.Tensor]]:
    """Returns the plan of a LayerNormMLP after some steps, the last output and gradients."""
    torch.manual_seed(5)
    layer = te.LayerNormMLP(
        64,
        128,
        set_parallel_mode=True,
        sequence_parallel=sequence,
        tp_group=dist.group.WORLD,
        name="mlp",
        params_dtype=torch.bfloat16,
        **CPU,
    )
    x = torch.randn(tokens, 64, dtype=torch.bfloat16).requires_grad_()
    if in_parts:
        layer.ranks.overlap = Overlap(gather=True, scatter=True, grad_gather=True)
    for _ in range(steps):
        layer.zero_grad()
        with scope(precision):
            y = layer(x)
        if torch.is_grad_enabled():
            y.sum().backward()
    (plan,) = [plan for plan in layer._plans.values() if plan.recordings]
    return plan, [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


@contextmanager
def _without_one_shot() -> Iterator[None]:
    """Inside, the group has no one-shot collectives."""
    found = one_shot_of(dist.group.WORLD, torch.device("cpu"))
    assert found is not None
    one_shot._known[dist.group.WORLD] = None
    try:
        yield
    finally:
        one_shot._known[dist.group.WORLD] = found


def _is_one_recording(recordings: dict[Any, Any]) -> bool:
    """Whether the only segment, with its collectives, runs from recordings both ways."""
    ((segment,),) = recordings.values()
    (way,) = segment.backwards.values()
    return segment.joined and segment.recorded is not None and not isinstance(way, str)


def recordings_around_collectives(rank: int) -> None:
    """Without one-shot collectives, everything but the collectives runs from recordings."""
    for precision, sequence, large in product(_PRECISIONS, (False, True), (False, True)):
        with _without_one_shot(), as_large_inputs(large):
            plan, _ = _trained(precision, sequence, steps=2)
            (found,) = plan.recordings.values()
            stages = [plan.chain.steps[s.start].stage.label for s in found]
            label = ("gather", "reduce_scatter") if sequence else ("replicated", "reduce")
            assert stages == ["norm", label[0], "matmul", label[1]], stages
            for segment in found[::2]:
                assert segment.recorded is not None, (precision, sequence, segment.refused)
                ways = list(segment.backwards.values())
                assert len(ways) == (2 if segment.overlaps else 1)
                assert not [way for way in ways if isinstance(way, str)], (precision, ways)


def recordings_with_collectives(rank: int) -> None:
    """One-shot collectives are recorded, too: equal bits, and an equal report."""
    for precision, sequence in product(_PRECISIONS, (False, True)):
        te.parallel_report(reset=True)
        plan, results = _trained(precision, sequence, steps=3)
        assert _is_one_recording(plan.recordings), (precision, sequence)
        report = te.parallel_report(reset=True)
        with _without_one_shot():
            expected = _trained(precision, sequence, steps=3)[1]
        same = [torch.equal(a, b) for a, b in zip(results, expected, strict=True)]
        assert all(same), (precision, sequence, same)
        assert report.counts == te.parallel_report().counts, (precision, sequence)


def recordings_with_parts(rank: int) -> None:
    """Transfers of large tensors in parts are recorded, too: equal bits, and an equal report."""
    with passing_in_parts():
        for precision in _PRECISIONS:
            te.parallel_report(reset=True)
            plan, results = _trained(precision, True, 3, in_parts=True)
            assert _is_one_recording(plan.recordings), precision
            report = te.parallel_report(reset=True)
            with _without_one_shot():
                plan, expected = _trained(precision, True, 3, in_parts=True)
            assert [len(segments) for segments in plan.recordings.values()] == [4]
            same = [torch.equal(a, b) for a, b in zip(results, expected, strict=True)]
            assert all(same), (precision, same)
            assert report.counts == te.parallel_report().counts, precision


def parts_of_odd_sizes(rank: int) -> None:
    """Tokens that FP8 pads, and calls without gradients, give the bits of collectives."""
    with passing_in_parts():
        for precision in _PRECISIONS:
            for tokens in (128, 24):
                results = _trained(precision, True, 2, in_parts=True, tokens=tokens)[1]
                with _without_one_shot():
                    expected = _trained(precision, True, 2, in_parts=True, tokens=tokens)[1]
                assert all([torch.equal(a, b) for a, b in zip(results, expected, strict=True)])
                with torch.no_grad():
                    found = _trained(precision, True, 1, in_parts=True, tokens=tokens)[1]
                trained = _trained(precision, True, 1, in_parts=True, tokens=tokens)[1]
                assert torch.equal(found[0], trained[0]), (precision, tokens)


def recipes_that_share_no_amaxes(rank: int) -> None:
    """Recipes that do not reduce amaxes over the group raise errors with sequence parallelism."""
    column, _ = column_and_row(name="fc")
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for recipe, group, text in (
        (DelayedScaling(reduce_amax=False), None, "reduce_amax=True, got False"),
        (DelayedScaling(), alone, "an fp8_group with all ranks of tp_group"),
    ):
        with te.fp8_autocast(fp8_recipe=recipe, fp8_group=group):
            message = raised(ValueError, lambda: column(x))
        assert text in message and "(layer fc)" in message, message


SCENARIOS = {
    run.__name__: run
    for run in (
        groups_that_do_not_fit,
        tokens_that_do_not_divide,
        gathered_output_of_the_norm,
        shards_of_one_seed,
        draws_of_a_trainers_tracker,
        attributes_of_parameters,
        bytes_that_move,
        weight_gradients_under_collectives,
        recordings_around_collectives,
        recordings_with_collectives,
        recordings_with_parts,
        parts_of_odd_sizes,
        recipes_that_share_no_amaxes,
        overlap_on_request,
        backwards_in_high_precision,
        *OPTIONS,
        *SETTINGS,
    )
}


def scenarios(rank: int) -> dict[str, str]:
    """Returns the traceback of each scenario that failed, "" where it passed."""
    return failures(SCENARIOS, rank)
