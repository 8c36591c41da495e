"""Transfers through peer memory between threads of this process, or between streams of one GPU."""

import threading

import pytest
import torch
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.chain import recording
from transformer_engine.pytorch.chain.stand_ins import stand_ins_of

ROOM = 4096  # bytes of a slot
ALL_OTHERS = -1  # te::kAllOthers
RANK, TIMEOUT, LOCK_FILE, LAST_STREAM = range(4)  # te::PeerField


class Ranks:
    """Ranks that map each other's memory. In a ring they send to neighbours only."""

    def __init__(self, count: int, device: str, ring: bool = False, timeout: float = 60.0) -> None:
        self.count, self.device = count, device
        self.slots = 4 if ring and count > 2 else 2
        size = _C.peer_memory_bytes(count, ROOM, ring)
        self.memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(count)]
        for memory in self.memories:
            flags = memory[-2 * self.slots * count * 8 :].view(torch.int64)
            flags[: self.slots * count] = 1  # all slots are free
        addresses = [memory.data_ptr() for memory in self.memories]
        self.streams = [torch.cuda.Stream() for _ in range(count)] if device == "cuda" else []
        self.held = [self._handles() for _ in range(count)]
        self.groups = [
            torch.tensor([rank, int(timeout * 1000), -1, 0, *handles, ROOM, int(ring), *addresses])
            for rank, (_, handles) in enumerate(self.held)
        ]

    def _handles(self):
        if self.device != "cuda":
            return None, [0] * 6
        stream, events = torch.cuda.Stream(), [torch.cuda.Event() for _ in range(5)]
        for event in events:
            event.record(stream)
        return (stream, events), [stream.cuda_stream, *[event.cuda_event for event in events]]

    def received(self, rank: int, sender: int, slot: int, like: torch.Tensor) -> torch.Tensor:
        """A view of the tensor that a rank has received, in peer memory."""
        place = _C.peer_slot_offset(self.groups[rank], sender, slot)
        return self.memories[rank][place : place + like.nbytes].view(like.dtype).view(like.shape)

    def send(self, x: torch.Tensor, rank: int, others, slot: int) -> None:
        """Sends a rank's tensor to `others(rank)`."""
        for other in others(rank):
            _C.peer_send(x, self.memories[rank], self.groups[rank], other, slot)

    def exchange(self, xs, slot: int, others) -> list[dict[int, torch.Tensor]]:
        """Every rank sends to `others(rank)`. Returns the received tensors of each, by sender."""
        found: list[dict[int, torch.Tensor]] = [{} for _ in xs]

        def receive(rank: int) -> None:
            memory, group = self.memories[rank], self.groups[rank]
            for other in others(rank):
                _C.peer_receive(memory, group, other, slot)
                found[rank][other] = self.received(rank, other, slot, xs[rank]).clone()
                copied = torch.empty_like(xs[rank])
                _C.peer_copy(copied, memory, group, other, slot)
                _C.peer_finish(copied, memory, group, slot)
                assert_bitwise(copied, found[rank][other])
                _C.peer_release(memory, group, other, slot)
            _C.peer_finish(xs[rank], memory, group, slot)

        self.act(lambda rank: self.send(xs[rank], rank, others, slot), receive)
        return found

    def sums(self, xs, bias, slot: int) -> list[torch.Tensor]:
        """Every rank sends its tensor to all others. Returns the results of `peer_sum`."""
        outs = [torch.empty_like(x) for x in xs]

        def receive(rank: int) -> None:
            own = self.memories[rank], self.groups[rank]
            _C.peer_sum(xs[rank], bias, outs[rank], *own, slot)
            _C.peer_finish(xs[rank], *own, slot)

        self.act(lambda rank: self.send(xs[rank], rank, to_all(self.count), slot), receive)
        return outs

    def gathered(self, xs, slot: int) -> list[list[torch.Tensor]]:
        """The tensors that each rank receives from all others, the previous rank's first."""
        found: list[list[torch.Tensor]] = [[] for _ in xs]

        def receive(rank: int) -> None:
            own = self.memories[rank], self.groups[rank]
            _C.peer_receive(*own, ALL_OTHERS, slot)
            for distance in range(1, self.count):
                sender = (rank - distance) % self.count
                found[rank].append(self.received(rank, sender, slot, xs[rank]).clone())
            _C.peer_release(*own, ALL_OTHERS, slot)
            _C.peer_finish(xs[rank], *own, slot)

        self.act(lambda rank: self.send(xs[rank], rank, lambda _: [ALL_OTHERS], slot), receive)
        return found

    def side_by_side(self, xs, slot: int) -> list[torch.Tensor]:
        """For each rank the matrix in its slot, to which every rank has written its columns."""
        found: list[torch.Tensor] = [torch.empty(0)] * self.count
        rows, cols = xs[0].shape
        whole = []
        for rank in range(self.count):
            place = _C.peer_slot_offset(self.groups[rank], ALL_OTHERS, slot)
            nbytes = self.count * xs[0].nbytes
            whole.append(self.memories[rank][place : place + nbytes].view(rows, -1))

        def send(rank: int) -> None:
            own = whole[rank].narrow(1, rank * cols, cols)
            _C.copy(xs[rank], own)
            _C.peer_spread(own, self.memories[rank], self.groups[rank], slot)

        def receive(rank: int) -> None:
            own = self.memories[rank], self.groups[rank]
            _C.peer_receive(*own, ALL_OTHERS, slot)
            found[rank] = whole[rank].clone()
            _C.peer_release(*own, ALL_OTHERS, slot)
            _C.peer_finish(xs[rank], *own, slot)

        self.act(send, receive)
        return found

    def act(self, send, receive) -> None:
        """Calls `send` and `receive` for each rank, on a thread or a stream of its own."""
        if self.streams:
            torch.cuda.synchronize()
            for step in (send, receive):
                for rank, stream in enumerate(self.streams):
                    with torch.cuda.stream(stream):
                        step(rank)
            torch.cuda.synchronize()
            return

        def both(rank: int) -> None:
            send(rank)
            receive(rank)

        threads = [threading.Thread(target=both, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def to_all(count: int):
    return lambda rank: [(rank + step) % count for step in range(1, count)]


def to_neighbours(count: int):
    return lambda rank: sorted({(rank + 1) % count, (rank - 1) % count})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("count", "ring"), [(2, False), (3, False), (2, True), (4, True)])
def test_ranks_receive_what_others_send(device, count, ring, dtype) -> None:
    """Three times, because a slot must be free before the second time."""
    ranks = Ranks(count, device, ring)
    others = to_neighbours(count) if ring else to_all(count)
    for step in range(3):
        xs = [torch.randint(0, 255, (9, 16), device=device).to(dtype) for _ in range(count)]
        for slot in range(ranks.slots):
            found = ranks.exchange(xs, slot, others)
            for rank in range(count):
                assert sorted(found[rank]) == sorted(others(rank)), step
                for other, got in found[rank].items():
                    assert_bitwise(got, xs[other])


@pytest.mark.parametrize("count", [2, 4, 40])
def test_all_others_receive_what_is_sent_to_all(device, count) -> None:
    """Three times, because a slot must be free before the second time."""
    ranks = Ranks(count, device)
    for _ in range(3):
        xs = [torch.randint(0, 255, (9, 16), device=device).to(torch.uint8) for _ in range(count)]
        for slot in range(ranks.slots):
            for rank, found in enumerate(ranks.gathered(xs, slot)):
                for distance, got in enumerate(found, start=1):
                    assert_bitwise(got, xs[(rank - distance) % count])


@pytest.mark.parametrize("count", [2, 4])
def test_columns_of_ranks_lie_side_by_side(device, count) -> None:
    ranks = Ranks(count, device)
    for slot in (0, 1, 1, 0):
        xs = [torch.randint(0, 255, (24, 32), device=device).to(torch.uint8) for _ in range(count)]
        for found in ranks.side_by_side(xs, slot):
            assert_bitwise(found, torch.cat(xs, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 4, 10])
@pytest.mark.parametrize("shape", [(6, 3, 16), (5, 7)], ids=str)
def test_sums_are_rounded_once(device, shape, count, dtype) -> None:
    """A rank adds its own tensor first, then that of the previous rank, and so on."""
    ranks = Ranks(count, device)
    bias = torch.randn(shape[-1], device=device).to(dtype)
    for slot in (0, 1, 0):
        xs = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
        for added in (bias, None):
            for rank, found in enumerate(ranks.sums(xs, added, slot)):
                expected = xs[rank].float()
                for distance in range(1, count):
                    expected = expected + xs[(rank - distance) % count].float()
                if added is not None:
                    expected = expected + added.float()
                assert_bitwise(found, expected.to(dtype))


def test_rows_may_have_gaps(device) -> None:
    ranks = Ranks(2, device)
    wide = [torch.randn(6, 5, 32, device=device) for _ in range(2)]
    found = ranks.exchange([x[:, :, 8:20] for x in wide], 0, to_all(2))
    assert_bitwise(found[0][1], wide[1][:, :, 8:20].contiguous())


def test_errors_name_what_is_wrong(device) -> None:
    ranks = Ranks(4, device, ring=True)
    own = ranks.memories[0], ranks.groups[0]
    x = torch.zeros(ROOM // 4 + 4, device=device)
    with pytest.raises(ValueError, match="expected at most 4096 bytes, got"):
        _C.peer_send(x, *own, 1, 0)
    with pytest.raises(ValueError, match="expected another rank of 4, got rank 0"):
        _C.peer_receive(*own, 0, 0)
    with pytest.raises(ValueError, match="expected a slot of 4, got slot 4"):
        _C.peer_release(*own, 1, 4)
    with pytest.raises(ValueError, match="the next rank of a ring or the previous one, got 2"):
        _C.peer_send(x[:8], *own, 2, 0)
    with pytest.raises(ValueError, match="memory for all ranks, got that of a ring"):
        _C.peer_send(x[:8], *own, ALL_OTHERS, 0)
    with pytest.raises(ValueError, match="expected at most 4096 bytes, got"):
        _C.peer_copy(x, *own, 1, 0)
    two = Ranks(2, device)
    slot = two.memories[0][ROOM - 8 : ROOM + 8]  # across two slots
    with pytest.raises(ValueError, match="in the 4096 bytes of the slot, got 16 bytes at 4088"):
        _C.peer_spread(slot, two.memories[0], two.groups[0], 0)
    with pytest.raises(ValueError, match="expected at most 4096 bytes, got"):
        _C.peer_sum(x, None, x, *own, 0)
    with pytest.raises(ValueError, match="for out, got"):
        _C.peer_sum(x[:8], None, x, *own, 0)
    with pytest.raises(ValueError, match="memory for all ranks, got that of a ring"):
        _C.peer_sum(x[:8], None, x[:8], *own, 0)
    with pytest.raises(ValueError, match="rows of one distance"):
        _C.peer_send(torch.zeros(4, 4, 8, device=device)[:, :3, :4], *own, 1, 0)


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(2, "cpu", timeout=0.2)
    with pytest.raises(RuntimeError, match="expected rank 1 of the group to take part"):
        _C.peer_receive(ranks.memories[0], ranks.groups[0], 1, 0)


def test_what_is_sent_lives_until_the_end(device) -> None:
    """A recording frees a tensor that it sends only after `peer_finish`."""
    ranks = Ranks(2, device)
    own, other = [(ranks.memories[rank], ranks.groups[rank]) for rank in range(2)]
    x = torch.randn(8, 8, device=device)
    (stand_in,) = stand_ins_of([x])

    def python():
        sent = torch.empty_like(stand_in)
        _C.copy(stand_in, sent)
        _C.peer_send(sent, *own, 1, 0)
        more = torch.empty_like(stand_in)
        _C.copy(stand_in, more)
        _C.peer_finish(sent, *own, 0)
        return [more], []

    recorded = recording.record(
        [x], [stand_in], [], [*own], python, recording.Slabs(scratch=False, saved=False)
    )
    assert not isinstance(recorded, str), recorded
    for _ in range(2):
        (place,) = recorded.results
        memory = recorded.run([x])
        assert_bitwise(place.within(memory[place.slot]), x)
        _C.peer_receive(*other, 0, 0)
        assert_bitwise(ranks.received(1, 0, 0, x), x)
        _C.peer_release(*other, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copy(device, dtype) -> None:
    x = torch.randint(0, 255, (7, 9), device=device).to(dtype)
    out = torch.empty_like(x)
    _C.copy(x, out)
    assert_bitwise(out, x)
    wide = torch.zeros(7, 3, 9, device=device).to(dtype)
    _C.copy(x, wide[:, 1])
    assert_bitwise(wide[:, 1].contiguous(), x)
    assert not wide[:, ::2].any()
    back = torch.empty_like(x)
    _C.copy(wide[:, 1], back)
    assert_bitwise(back, x)
    with pytest.raises(ValueError, match="out with the sizes of x"):
        _C.copy(x, out[1:])
    with pytest.raises(ValueError, match="expected x or out to be contiguous, got 7 and 63 rows"):
        _C.copy(wide[:, 1], torch.empty(7, 9, 2, device=device).to(dtype)[..., 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_zero(device, dtype) -> None:
    x = torch.ones(7, 9, device=device, dtype=dtype)
    _C.zero(x[5:])
    _C.zero(x[:4, 7:])
    _C.zero(x[:0])
    expected = torch.ones_like(x)
    expected[5:] = expected[:4, 7:] = 0
    assert_bitwise(x, expected)
    with pytest.raises(ValueError, match="rows of one distance"):
        _C.zero(torch.ones(4, 4, 8, device=device)[:, :3, :4])
