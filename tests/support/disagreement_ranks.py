"""Calls in which two ranks of distributed/test_disagreements differ, and the errors that result."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from debug_session import inspect, section
from rank_device import here
from tensor_parallel_ranks import column_and_row, scope

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.parallel.agreement import _compared
from transformer_engine.pytorch.parallel.meeting import Meeting

TOKENS = 16


def _shared(recipe: str = "bf16", tokens: int = TOKENS, name: str = "fc") -> Any:
    """Calls a layer that both ranks share."""
    column, _ = column_and_row(name=name)
    with scope(recipe):
        return column(torch.randn(tokens, 64, dtype=torch.bfloat16))


def _replica(layers: int, group: Any = None, **recipe: Any) -> None:
    """Runs a forward of `layers` FP8 modules, of which each rank has a replica."""
    modules = [te.Linear(32, 32, device=here()) for _ in range(layers)]
    with te.fp8_autocast(fp8_recipe=DelayedScaling(**recipe), fp8_group=group):
        for module in modules:
            module(torch.randn(TOKENS, 32, device=here()))


def a_module_that_one_lacks(rank: int) -> None:
    for name in ("fc1", "fc2")[rank:]:
        _shared(name=name)


def a_replica_with_fewer_modules(rank: int) -> None:
    _replica(2 - rank)


def other_shapes(rank: int) -> None:
    _shared(tokens=TOKENS * (1 + rank))


def another_recipe(rank: int) -> None:
    _shared(("delayed", "current")[rank])


def another_activation(rank: int) -> None:
    shared = {"set_parallel_mode": True, "tp_group": dist.group.WORLD, "tp_size": 2}
    mlp = te.LayerNormMLP(
        32, 64, activation=("gelu", "relu")[rank], device=here(), name="mlp", **shared
    )
    mlp(torch.randn(TOKENS, 32, device=here()))


def another_dropout(rank: int) -> None:
    shared = {"set_parallel_mode": True, "tp_group": dist.group.WORLD, "tp_size": 2}
    layer = te.TransformerLayer(32, 64, 4, device=here(), name="layer", **shared)
    layer.train(bool(rank))(torch.randn(TOKENS, 1, 32, device=here()))


def a_replica_with_another_recipe(rank: int) -> None:
    _replica(1, amax_history_len=4 + rank)


def another_configuration_of_the_debugger(rank: int) -> None:
    look = section("LogTensorStats", tensors=["activation"], stats=[("max", "min")[rank]])
    with TemporaryDirectory() as folder:
        debug_api.initialize(config_file={"look": look}, log_dir=Path(folder))
        try:
            inspect("layer", "activation", torch.ones(4))
            debug_api.step()
        finally:
            debug_api.end_debug()


def no_autocast_on_one(rank: int) -> None:
    _shared(("bf16", "delayed")[rank])


def no_gradients_on_one(rank: int) -> None:
    with torch.set_grad_enabled(bool(rank)):
        _shared()


def classes_in_unequal_parts(rank: int) -> None:
    logits = torch.zeros(4, 8 * (1 + rank), device=here())
    target = torch.zeros(4, dtype=torch.int64, device=here())
    te.parallel_cross_entropy(logits, target, dist_process_group=dist.group.WORLD)


def sequences_of_unequal_parts(rank: int) -> None:
    te.distributed.gather_sequence(torch.zeros(4 * (1 + rank), device=here()), dist.group.WORLD)


def sequences_that_end_elsewhere(rank: int) -> None:
    ends = torch.tensor([0, 4 + 4 * rank, 16], dtype=torch.int32, device=here())
    te.distributed.gather_sequence(torch.zeros(8, device=here()), dist.group.WORLD, cu_seqlens=ends)


def one_sequence_or_several(rank: int) -> None:
    ends = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=here())
    te.distributed.gather_sequence(
        torch.zeros(12, device=here()), dist.group.WORLD, cu_seqlens=(None, ends)[rank]
    )


def a_rank_that_does_not_come(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        layer = te.Linear(16, 16, parallel_mode="row", tp_group=group, name="fc", device=here())
        layer(torch.ones(16, 8, device=here()))


def meetings_of_some_ranks_before(rank: int) -> None:
    """Meetings of rank 0 alone do not count for both ranks: each set of ranks has its own count."""
    alone, both = dist.new_group([0]), dist.new_group([0, 1], timeout=timedelta(seconds=1))
    for group in (alone, both)[rank:]:
        Meeting(group, "a purpose").hold({}, "a call", lambda posts: {})


def nothing(rank: int) -> None:
    """Raises nothing: generated names may differ, and calls of one structure meet only once.

    If a layer has been called with many shapes, calls with others do not meet.
    """
    unnamed = [te.Linear(16, 16, device=here()) for _ in range(1 + rank)]
    column, _ = column_and_row()
    with patch.object(Meeting, "hold", autospec=True, side_effect=Meeting.hold) as met:
        for tokens in (16, 16, 32, 16, 32):
            column(torch.randn(tokens, 64, dtype=torch.bfloat16))
        assert met.call_count == 2, (met.call_count, unnamed)
        with patch("transformer_engine.pytorch.chain.chain.Chain.most_shapes", 3):
            for tokens in (48, 64, 80, 48, 64):
                column(torch.randn(tokens, 64, dtype=torch.bfloat16))
        assert met.call_count == 3, met.call_count


def sequences_of_many_lengths(rank: int) -> None:
    """Raises nothing: only the first lengths are compared."""
    with (
        patch("transformer_engine.pytorch.parallel.agreement.MOST_COMPARED", 2),
        patch.object(Meeting, "hold", autospec=True, side_effect=Meeting.hold) as met,
    ):
        _compared.pop(dist.group.WORLD, None)
        for tokens in (10, 20, 10, 30, 40, 20):
            x = torch.full((tokens,), rank, device=here())
            assert len(te.distributed.gather_sequence(x, dist.group.WORLD)) == 2 * tokens
    assert met.call_count == 2, met.call_count


def attention_to_many_lengths(rank: int) -> None:
    """Raises nothing: only the first lengths are compared, but each call is checked."""
    attention = te.DotProductAttention(2, 16, qkv_format="bshd", attention_dropout=0.0)
    attention.set_context_parallel_group(dist.group.WORLD, [0, 1], None, "all_gather")
    q = torch.ones(1, 48, 2, 16, dtype=torch.bfloat16, device=here())
    with (
        patch("transformer_engine.pytorch.parallel.agreement.MOST_COMPARED", 2),
        patch.object(Meeting, "hold", autospec=True, side_effect=Meeting.hold) as met,
    ):
        for tokens in (16, 32, 48, 16):
            x = q[:, :tokens]
            assert attention(x, x, x, attn_mask_type="causal").shape == (1, tokens, 32)
        assert met.call_count == 2, met.call_count
        try:
            attention(x, x, x, attn_mask_type="arbitrary", attention_mask=x)
        except ValueError as error:
            assert "expected attention_mask of 16 queries" in str(error), error
        else:
            raise AssertionError("expected an error")


CASES: dict[str, Callable[[int], None]] = {
    run.__name__: run
    for run in (
        a_module_that_one_lacks,
        a_replica_with_fewer_modules,
        other_shapes,
        another_recipe,
        another_activation,
        another_dropout,
        a_replica_with_another_recipe,
        another_configuration_of_the_debugger,
        no_autocast_on_one,
        no_gradients_on_one,
        classes_in_unequal_parts,
        sequences_of_unequal_parts,
        sequences_that_end_elsewhere,
        one_sequence_or_several,
        a_rank_that_does_not_come,
        meetings_of_some_ranks_before,
        nothing,
        sequences_of_many_lengths,
        attention_to_many_lengths,
    )
}


def disagreements(rank: int) -> dict[str, str]:
    """Returns the error of each case on this rank, by name; "" where there is none."""
    found = {}
    for name, run in CASES.items():
        try:
            run(rank)
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
        dist.barrier()
    return found
