"""Asynchronous collectives along the first axis of tensors; their results are `Pending`.

`way_of` chooses how a collective runs. Small ones run on the caller's stream: the host limits their
speed, and a second stream would cost the host more time than overlap saves. If all ranks are on one
host, small collectives are `OneShot` collectives. Collectives of 16 MiB and more are copies through
peer memory, part by part, if a layer asks for that. All others are calls of torch.distributed. In
compiled code all are torch's functional collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine import _C
from transformer_engine.pytorch import capture
from transformer_engine.pytorch._torch_private import functional_collectives as functional
from transformer_engine.pytorch.kernels.dropout_add import dropout_add_forward
from transformer_engine.pytorch.parallel.one_shot import OneShot, can_sum, one_shot_of
from transformer_engine.pytorch.parallel.peer_memory import ALL_OTHERS, PeerMemory, peer_memory

# torch 2.13 has other names for these, and warns of the old ones at each call.
gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)

GATHERS, _SCATTERS = range(2)  # slots of peer memory
Finish = Callable[[Any], Any]


class RankParts(NamedTuple):
    """The result of an all-gather, part by part: the rows of one rank after the other.

    Attributes:
        ranks: the number of parts.
        each: yields (rank, rows), this rank first, the others as they arrive. Rows are valid until
            the iterator ends.
    """

    ranks: int
    each: Iterator[tuple[int, Any]]


class Pending:
    """The result of a collective that was started; `wait` returns it.

    Args:
        result: the tensor that the collective fills.
        work: a handle with `wait`, such as torch's; None if the result is there already.
        finish: a function of the result, called by `wait`, which returns the function's result.
        held: tensors that must stay alive until `wait`, because the collective reads them.
    """

    __slots__ = ("_finish", "_held", "_parts", "_work", "result")

    def __init__(
        self, result: Any, work: Any = None, finish: Finish | None = None, held: Any = None
    ) -> None:
        self.result = result
        self._work = work
        self._finish = finish
        self._held = held
        self._parts: Callable[[bool], RankParts] | None = None

    def wait(self) -> Any:
        """The result. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self.result = self._finish(self.result)
        self._work = self._finish = self._held = self._parts = None
        return self.result

    def then(self, finish: Finish, of_part: Finish | None = None) -> Pending:
        """A pending `finish(result)`.

        `of_part` does the same with the rows of one rank; it is None if `finish` needs the whole.
        """
        made = Pending(None, self, lambda _: finish(self.result))
        if of_part is not None and self.has_parts:

            def of_parts(keep: bool) -> RankParts:
                found = self.parts(keep)
                assert found is not None
                return RankParts(found.ranks, ((rank, of_part(part)) for rank, part in found.each))

            made._parts = of_parts
        return made

    @property
    def has_parts(self) -> bool:
        """Whether `parts` returns any."""
        return self._parts is not None

    def parts(self, keep: bool) -> RankParts | None:
        """The result part by part; None if it arrives as a whole. The caller must read all parts.

        Args:
            keep: also assemble the whole result, because `wait` will be called afterwards.
        """
        return None if self._parts is None else self._parts(keep)

    def lend(self) -> Any:
        """The result, to be read before `release` is called."""
        return self.wait()

    def release(self) -> None:
        """The result that was lent is no longer read."""


class _PeerAllGather(Pending):
    """An all-gather through peer memory."""

    __slots__ = ("_own", "_transfer")

    def __init__(self, x: torch.Tensor, memory: PeerMemory) -> None:
        super().__init__(None)
        self._own, self._transfer = x, memory.start(self, GATHERS)
        self._transfer.send(ALL_OTHERS, x)

    @property
    def has_parts(self) -> bool:
        return True

    def parts(self, keep: bool) -> RankParts:
        return RankParts(self._transfer.memory.ranks, self._receive(keep))

    def _receive(self, keep: bool, at_once: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        own, memory = self._own, self._transfer.memory
        rows = own.shape[0]
        if self.result is not None:  # a later collective has waited for this one already
            yield from enumerate(self.result.split(rows))
            return
        if keep:
            result = own.new_empty((memory.ranks * rows, *own.shape[1:]))
            _C.copy(own, result.narrow(0, memory.rank * rows, rows))
        yield memory.rank, own
        for rank, part in self._transfer.receive(own, at_once):
            if keep:
                _C.copy(part, result.narrow(0, rank * rows, rows))
            yield rank, part
        if keep:
            self.result = result

    def wait(self) -> torch.Tensor:
        """The rows of all ranks."""
        if self.result is None:
            for _ in self._receive(keep=True, at_once=True):
                pass
        return self.result


class LazyProduct(Pending):
    """A tensor that is computed when it is read: all of it by `wait`, or some rows by an index.

    Args:
        out: memory of the tensor.
        compute: writes the rows of a slice into `out`; all rows for None.
    """

    __slots__ = ("_compute", "_out", "device", "dtype", "nbytes", "shape")

    def __init__(self, out: torch.Tensor, compute: Callable[[slice | None], object]) -> None:
        super().__init__(None)
        self._out, self._compute = out, compute
        self.shape, self.dtype, self.device = out.shape, out.dtype, out.device
        self.nbytes = out.nbytes

    def dim(self) -> int:
        """The number of dimensions."""
        return self._out.dim()

    def wait(self) -> torch.Tensor:
        """Compute all rows."""
        if self.result is None:
            self._compute(None)
            self.result = self._out
        return self.result

    def __getitem__(self, where: slice) -> torch.Tensor:
        """Compute some rows."""
        self._compute(where)
        return self._out[where]


class _PeerReduceScatter(Pending):
    """A reduce-scatter through peer memory. Rows of other ranks are computed and sent first."""

    __slots__ = ("_bias", "_own", "_transfer")

    def __init__(
        self, x: torch.Tensor | LazyProduct, memory: PeerMemory, bias: torch.Tensor | None
    ) -> None:
        super().__init__(None)
        self._bias, self._transfer = bias, memory.start(self, _SCATTERS)
        count = x.shape[0] // memory.ranks
        for rank in memory.others:
            self._transfer.send(rank, x[rank * count : (rank + 1) * count])
        self._held = x
        self._own = x[memory.rank * count : (memory.rank + 1) * count]

    def wait(self) -> torch.Tensor:
        """This rank's rows of the sum."""
        if self.result is None:
            self.result = self._transfer.receive_sum(self._own, self._bias)
            self._held = None
        return self.result


def waited(value: Any) -> Any:
    """The value; waits for it if it is pending."""
    return value.wait() if isinstance(value, Pending) else value


def lent(value: Any) -> Any:
    """The value, to be read before `release`; waits for it if it is pending."""
    return value.lend() if isinstance(value, Pending) else value


def release(value: Any) -> None:
    """What `lent` returned for this value is no longer read."""
    if isinstance(value, Pending):
        value.release()


def _received_bytes(x: torch.Tensor | LazyProduct, ranks: int, whole: bool) -> int:
    """The bytes that a rank receives. FP8 codes count as the 16-bit values that they stand for."""
    part = x.nbytes * (2 if x.dtype.itemsize == 1 else 1) // (ranks if whole else 1)
    return part * (ranks - 1)


def is_large(x: torch.Tensor | LazyProduct, ranks: int, whole: bool) -> bool:
    """Whether a collective takes so long that it should overlap with other work.

    `x` is the input on one rank: `whole` says that it has the size of the tensor of all ranks, and
    not that of one rank's part.
    """
    return _received_bytes(x, ranks, whole) > capture.HOST_BOUND_BYTES


def memory_for_parts(x: torch.Tensor | LazyProduct, group: Any, whole: bool) -> PeerMemory | None:
    """Peer memory for a collective in parts; None if parts would take longer, or there is none.

    For `x` and `whole` see `is_large`.
    """
    ranks = dist.get_world_size(group)
    if _received_bytes(x, ranks, whole) < capture.HOST_BOUND_BYTES:
        return None
    return peer_memory(group, x.device, x.nbytes // (ranks if whole else 1))


class Way(NamedTuple):
    """How a collective runs; torch runs it if the first two are None.

    Attributes:
        one_shot: the collectives that run it, or None.
        memory: peer memory through which it passes in parts, or None.
        beside: it runs on a separate stream.
    """

    one_shot: OneShot | None
    memory: PeerMemory | None
    beside: bool


def way_of(x: torch.Tensor | LazyProduct, group: Any, whole: bool, in_parts: bool = False) -> Way:
    """How a collective runs; during CUDA graph capture, those of torch run on separate streams.

    In compiled code torch runs all collectives. `in_parts` uses peer memory if there is any for
    tensors of this size. For `x` and `whole` see `is_large`.
    """
    if torch.compiler.is_compiling():
        return Way(None, None, False)
    memory = memory_for_parts(x, group, whole) if in_parts else None
    if memory is not None:
        return Way(None, memory, True)
    if is_large(x, dist.get_world_size(group), whole):
        return Way(None, None, True)
    one_shot = one_shot_of(group, x.device)
    return Way(one_shot, None, one_shot is None and capture.is_capturing())


def all_reduce(x: torch.Tensor, group: Any, op: str = "sum") -> Pending:
    """The sum (or maximum) over the ranks, in the memory of `x`; in compiled code a fresh tensor.

    `x` is contiguous, of equal shape on all ranks; `op` is `sum` or `max`.
    """
    if torch.compiler.is_compiling():
        return Pending(functional.wait_tensor(functional.all_reduce(x, op, group)))
    way = way_of(x, group, whole=True)
    if way.one_shot is not None and can_sum(x):
        return Pending(way.one_shot.all_reduce(x, op))
    refuse_recording()
    kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return Pending(x, dist.all_reduce(x, kind, group, async_op=way.beside))


def all_gather(x: torch.Tensor, group: Any, in_parts: bool = False) -> Pending:
    """Concatenate the tensors `[rows, ...]` of all ranks to `[ranks * rows, ...]`.

    `x` is contiguous, of equal shape on all ranks. `in_parts` uses peer memory if there is any for
    tensors of this size, so that the result has `parts`.
    """
    if torch.compiler.is_compiling():
        return Pending(functional.wait_tensor(functional.all_gather_tensor(x, 0, group)))
    way = way_of(x, group, False, in_parts)
    if way.one_shot is not None:
        return Pending(way.one_shot.all_gather(x))
    if way.memory is not None:
        return _PeerAllGather(x, way.memory)
    refuse_recording()
    result = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    work = gather_into(result, x, group=group, async_op=way.beside)
    return Pending(result, work, held=x)


def reduce_scatter(
    x: torch.Tensor | LazyProduct,
    group: Any,
    bias: torch.Tensor | None = None,
    in_parts: bool = False,
) -> Pending:
    """This rank's rows of the sum over the ranks: `[rows / ranks, ...]` of `[rows, ...]`.

    `x` is contiguous, or a `LazyProduct`, whose rows are computed when they are sent. `bias`,
    `[cols]` of the dtype of `x`, is added to the sum. For `in_parts` see `all_gather`.
    """
    if torch.compiler.is_compiling():
        summed = functional.reduce_scatter_tensor(x, "sum", 0, group)
        return Pending(plus_bias(functional.wait_tensor(summed), bias))
    ranks = dist.get_world_size(group)
    way = way_of(x, group, True, in_parts)
    if way.memory is not None:
        return _PeerReduceScatter(x, way.memory, bias)
    whole: torch.Tensor = waited(x)
    if way.one_shot is not None and can_sum(whole):
        return Pending(plus_bias(way.one_shot.reduce_scatter(whole), bias))
    refuse_recording()
    result = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    work = scatter_into(result, whole, group=group, async_op=way.beside)
    summed = Pending(result, work, held=whole)
    return summed if bias is None else summed.then(lambda total: plus_bias(total, bias))


def all_to_all(x: torch.Tensor, group: Any) -> Pending:
    """Part r of the first axis goes to rank r; part r of the result comes from rank r.

    `x` is contiguous, of equal shape on all ranks.
    """
    way = way_of(x, group, whole=True)
    if way.one_shot is not None:
        return Pending(way.one_shot.all_to_all(x))
    refuse_recording()
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=group, async_op=way.beside)
    return Pending(received, work, held=x)


def plus_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x + bias`; `x` itself without one."""
    return x if bias is None else dropout_add_forward(x, bias, None, None, 0.0)


def refuse_recording() -> None:
    """Called before calls of torch.distributed, which cannot be recorded.

    Raises:
        NotRecordedError: while recording.
    """
    if _C.is_recording():
        raise capture.NotRecordedError("a collective of torch.distributed")
