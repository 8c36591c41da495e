"""Forces small tensors through peer memory, part by part, on CPUs as well."""

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

COLUMNS = -1  # stands for "columns" in lists of ranks


@contextmanager
def in_parts() -> Iterator[list[int]]:
    """Inside, layers that ask for overlap pass tensors part by part, however small they are.

    Layers choose the code path of large inputs. Yields a list that gets an element for each part
    whose transfer runs from Python.
    """
    patch = pytest.MonkeyPatch()
    received = _use_peer_memory(patch)
    patch.setattr(tensor_parallel_ranks, "pair", _asking(tensor_parallel_ranks.pair))
    te.initialize_ub([1024, 1024], dist.get_world_size())
    try:
        with as_large_inputs(largest=1024):
            yield received
        dist.barrier()  # no rank leaves while another still receives
    finally:
        te.destroy_ub()
        patch.undo()


def _use_peer_memory(patch: pytest.MonkeyPatch) -> list[int]:
    """Lets tensors of any size use peer memory, on CPUs as well; returns the list of transfers."""
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
    """Returns `tensor_parallel_ranks.matrix` with transfers in parts, and the number of parts."""
    with in_parts() as received:
        return tensor_parallel_ranks.matrix(rank, cases), len(received)


def weights_in_fp8(rank: int) -> tuple[list[float], int]:
    """Returns differences of results and gradients between transfers in parts and as a whole.

    The second value counts the transposes that were gathered by their columns.
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
    """Returns how many tensors stay alive after some steps in parts without garbage collection."""
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
    """Returns `context_cases.outcomes` with rings in peer memory, and the number of transfers."""
    patch = pytest.MonkeyPatch()
    received = _use_peer_memory(patch)
    try:
        found = outcomes(rank, cases)
        dist.barrier()  # no rank leaves while another still receives
        return found, len(received)
    finally:
        patch.undo()


def recorded_rings(rank: int) -> list[bool]:
    """Whether rings with cuDNN are recorded, and whether all steps give the bits of the first.

    Three steps may run from a recording; a fourth one is not recorded.
    """
    torch.manual_seed(2 + rank)
    query, *pair = (torch.randn(2, 16, n, 16, device=here()).bfloat16() for n in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (query, *pair)]
    found = []
    patch = pytest.MonkeyPatch()
    _use_peer_memory(patch)
    # The gradient of queries is a sum whose order depends on cuDNN's blocks.
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
        dist.barrier()  # no rank leaves while another still receives
    finally:
        patch.undo()
    return found


def _stream() -> Any:
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def _step(attention: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def _asking(pair: Any) -> Any:
    """Returns `pair` with all layers of its first module asking for overlap."""

    def asking(*arguments: Any) -> Any:
        parallel, alone = pair(*arguments)
        for module in parallel.modules():
            if isinstance(module, SharedByRanks):
                module.ranks.overlap = Overlap(gather=True, scatter=True, grad_gather=True)
        return parallel, alone

    return asking
