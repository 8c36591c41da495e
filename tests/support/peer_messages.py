"""Collectives that go part by part through peer memory, however small, and on CPUs, too."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensor_parallel_ranks
import torch
import torch.distributed as dist
from context_cases import outcomes
from rank_device import here
from recordings import all_recorded
from sizes import as_large_inputs

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.context import ring
from transformer_engine.pytorch.parallel import peer_memory
from transformer_engine.pytorch.parallel.groups import SharedByRanks
from transformer_engine.pytorch.parallel.overlap import Overlap

COLUMNS = -1  # in the place of a rank


@contextmanager
def in_parts() -> Iterator[list[int]]:
    """Inside, layers that ask for overlap pass tensors part by part, however small they are.

    Calls are as those with large inputs are. Yields a list that gets an element for each part
    whose transfer runs from Python.
    """
    patch = pytest.MonkeyPatch()
    received = _use_peer_memory(patch)
    patch.setattr(tensor_parallel_ranks, "pair", _asking(tensor_parallel_ranks.pair))
    te.initialize_ub([1024, 1024], dist.get_world_size())
    try:
        with as_large_inputs(largest=1024):
            yield received
        dist.barrier()  # nobody leaves while another still receives
    finally:
        te.destroy_ub()
        patch.undo()


def _use_peer_memory(patch: pytest.MonkeyPatch) -> list[int]:
    """Pass tensors through peer memory, however small they are, on CPUs, too."""
    patch.setattr(peer_memory, "LEAST_BYTES", 0)
    patch.setattr(peer_memory, "DEVICES", {"cpu", "cuda"})
    received: list[int] = []
    transfer_type = peer_memory.Transfer
    receive, receive_sum = transfer_type.receive, transfer_type.receive_sum
    borrow, receive_all = transfer_type.borrow, transfer_type.receive_all

    def counted(*arguments: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for rank, part in receive(*arguments):
            received.append(rank)
            yield rank, part

    def counted_sum(transfer: Any, *arguments: Any) -> torch.Tensor:
        received.extend(transfer.memory.others)
        return receive_sum(transfer, *arguments)

    def counted_borrow(transfer: Any, like: torch.Tensor, sender: int) -> torch.Tensor:
        received.append(sender)
        return borrow(transfer, like, sender)

    def counted_columns(transfer: Any) -> None:
        received.append(COLUMNS)
        receive_all(transfer)

    patch.setattr(transfer_type, "receive", counted)
    patch.setattr(transfer_type, "receive_all", counted_columns)
    patch.setattr(transfer_type, "receive_sum", counted_sum)
    patch.setattr(transfer_type, "borrow", counted_borrow)
    return received


def matrix_in_parts(rank: int, cases: Any) -> Any:
    """`tensor_parallel_ranks.matrix` in parts, and how many parts came."""
    with in_parts() as received:
        return tensor_parallel_ranks.matrix(rank, cases), len(received)


def weights_in_fp8(rank: int) -> tuple[list[float], int]:
    """How far results and gradients in parts are from those that arrive as a whole.

    Also how many transposes were gathered by their columns.
    """

    def steps(overlap: Overlap) -> list[torch.Tensor]:
        torch.manual_seed(1)
        recipe = tensor_parallel_ranks.RECIPES["delayed"]
        with te.quantized_model_init(recipe=recipe):
            mlp = te.LayerNormMLP(
                *(tensor_parallel_ranks.HIDDEN, tensor_parallel_ranks.FFN),
                set_parallel_mode=True,
                sequence_parallel=True,
                tp_group=dist.group.WORLD,
                tp_size=dist.get_world_size(),
                params_dtype=torch.bfloat16,
                device=here(),
            )
        mlp.ranks.overlap = overlap
        torch.manual_seed(2 + rank)
        x = torch.randn(16, 2, tensor_parallel_ranks.HIDDEN).to(here(), torch.bfloat16)
        x.requires_grad_()
        for _ in range(2):
            with tensor_parallel_ranks.scope("delayed"):
                y = mlp(x)
            y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, mlp.fc1_weight.grad, mlp.fc2_weight.grad]

    whole = steps(Overlap())
    with in_parts() as received:
        parts = steps(Overlap(gather=True, scatter=True, grad_gather=True))
    pairs = zip(parts, whole, strict=True)
    return [tensor_parallel_ranks.difference(x, y) for x, y in pairs], received.count(COLUMNS)


def tensors_left(rank: int) -> int:
    """How many tensors some steps in parts leave behind where nobody collects garbage."""
    with in_parts():
        shared = tensor_parallel_ranks.MODULES["layer"]
        layer, _ = tensor_parallel_ranks.pair(shared, True, torch.float32)
        x = torch.randn(8, 2, tensor_parallel_ranks.HIDDEN, device=here(), requires_grad=True)

        def alive() -> int:
            layer(x).sum().backward()
            dist.barrier()
            return sum([issubclass(type(one), torch.Tensor) for one in gc.get_objects()])

        alive()
        gc.collect()
        gc.disable()
        try:
            first = alive()
            for _ in range(3):
                last = alive()
        finally:
            gc.enable()
        return last - first


def rings_in_peer_memory(rank: int, cases: Any) -> Any:
    """`context_cases.outcomes` whose rings pass tensors so, however small they are, and how many.

    On GPUs that is peer memory.
    """
    patch = pytest.MonkeyPatch()
    received = _use_peer_memory(patch)
    try:
        found = outcomes(rank, cases)
        dist.barrier()  # nobody leaves while another still receives
        return found, len(received)
    finally:
        patch.undo()


def recorded_rings(rank: int) -> list[bool]:
    """Whether rings of cuDNN run from recordings, with the bits of the first time.

    Then whether they have the bits of calls that are not recorded.
    """
    torch.manual_seed(2 + rank)
    query, *pair = (torch.randn(2, 16, n, 16, device=here()).bfloat16() for n in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (query, *pair)]
    found = []
    patch = pytest.MonkeyPatch()
    _use_peer_memory(patch)
    # The gradient of queries is a sum in the order of cuDNN's blocks.
    patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    try:
        for mask in ("causal", "no_mask"):
            attention = te.DotProductAttention(4, 16, 2, qkv_format="bshd", attn_mask_type=mask)
            attention.set_context_parallel_group(dist.group.WORLD, None, _stream(), "p2p")
            steps = [_step(attention, inputs) for _ in range(3)]
            found.append(all_recorded(attention._core))
            with patch.context() as inner:
                never = ring.BACKEND._replace(recordable=lambda call: False)
                inner.setattr(ring, "BACKEND", never)
                steps.append(_step(attention, inputs))
            found += [
                torch.equal(x, y) for step in steps for x, y in zip(step, steps[0], strict=True)
            ]
        dist.barrier()  # nobody leaves while another still receives
    finally:
        patch.undo()
    return found


def _stream() -> Any:
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def _step(attention: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def _asking(pair: Any) -> Any:
    """`pair`, whose first module asks for overlap."""

    def asking(*arguments: Any) -> Any:
        parallel, alone = pair(*arguments)
        for module in parallel.modules():
            if isinstance(module, SharedByRanks):
                module.ranks.overlap = Overlap(gather=True, scatter=True, grad_gather=True)
        return parallel, alone

    return asking
