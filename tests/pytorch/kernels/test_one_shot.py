"""one_shot between threads of this process, or between streams of one GPU."""

import threading

import pytest
import torch
from one_shot_ranks import summed
from rulers import assert_bitwise

from transformer_engine import _C

CONCATENATE, SUM, MAX = range(3)
ROOM = 4096  # bytes of a slot
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Ranks:
    """Ranks that share memory; `run` calls one_shot on all of them at once."""

    def __init__(self, count: int, device: str, timeout: float = 60.0) -> None:
        size = _C.one_shot_header(count) + 2 * ROOM
        self.memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(count)]
        addresses = [memory.data_ptr() for memory in self.memories]
        self.groups = [
            torch.tensor([rank, int(timeout * 1000), -1, 0, *addresses]) for rank in range(count)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(count)] if device == "cuda" else []

    def run(self, xs, outs, scatters: bool, how: int) -> None:
        """On the CPU a call waits for the other ranks, so each rank has a thread."""
        calls = list(zip(xs, outs, self.memories, self.groups, strict=True))
        if self.streams:
            torch.cuda.synchronize()
            for stream, call in zip(self.streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    _C.one_shot(*call, scatters, how)
            torch.cuda.synchronize()
            return
        threads = [
            threading.Thread(target=_C.one_shot, args=(*call, scatters, how)) for call in calls
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def draw(ranks: int, shape, dtype, device: str):
    return [torch.randn(shape).to(dtype).to(device) for _ in range(ranks)]


@pytest.mark.sanitize
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 200])  # parts of a slot, and several slots
def test_sum_of_parts(device, ranks, dtype, rows):
    """This is a reduce-scatter."""
    xs = draw(ranks, (ranks * rows, 16), dtype, device)
    outs = [x.new_empty(rows, 16) for x in xs]
    Ranks(ranks, device).run(xs, outs, True, SUM)
    for rank, out in enumerate(outs):
        assert_bitwise(out, summed([x[rank * rows : (rank + 1) * rows] for x in xs]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_and_maximum_in_place(device, dtype):
    """These are all-reduces. The maximum ignores NaN.

    CUDA loads a kernel at its first launch, which may wait for running kernels. The largest size
    needs two kernels, so it comes last: both have been loaded for smaller sizes.
    """
    ranks = Ranks(3, device)
    for size in (1, 5, 64, 3001):
        for _ in range(3):  # slots are used in turn
            xs = draw(3, (size,), dtype, device)
            sums = [x.clone() for x in xs]
            ranks.run(sums, sums, False, SUM)
            xs[1][0] = float("nan")
            expected = torch.stack(xs).float().nan_to_num(-10.0).amax(0).to(dtype)
            ranks.run(xs, xs, False, MAX)
            for one in xs:
                assert_bitwise(one, expected)
            assert all(torch.equal(one, sums[0]) for one in sums[1:])


@pytest.mark.sanitize
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 6, 80, 5003])
def test_concatenated_bytes(device, ranks, size):
    """An all-gather, then an all-to-all, also of sizes that do not allow wide accesses."""
    xs = [torch.randint(256, (size,), dtype=torch.uint8, device=device) for _ in range(ranks)]
    outs = [x.new_empty(ranks * size) for x in xs]
    together = Ranks(ranks, device)
    together.run(xs, outs, False, CONCATENATE)
    for out in outs:
        assert_bitwise(out, torch.cat(xs))
    back = [x.new_empty(ranks * size) for x in xs]
    together.run(outs, back, True, CONCATENATE)
    for rank, found in enumerate(back):
        assert_bitwise(found, xs[rank].repeat(ranks))


def test_calls_of_many_sizes(device):
    """Each call receives its own data after calls of other sizes."""
    ranks = Ranks(2, device)
    for size in (5000, 3, 700, 1, 1, 4096, 2048, 16, 9000):
        xs = draw(2, (size,), torch.float32, device)
        outs = [x.new_empty(2 * size) for x in xs]
        ranks.run(xs, outs, False, CONCATENATE)
        for out in outs:
            assert_bitwise(out, torch.cat(xs))


def test_a_rank_that_does_not_come() -> None:
    ranks = Ranks(2, "cpu", timeout=0.3)
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"\[one_shot\] expected rank 1 .* within 0.3 s"):
        _C.one_shot(x, x, ranks.memories[0], ranks.groups[0], False, SUM)


def test_bad_input() -> None:
    ranks = Ranks(2, "cpu")
    memory, group = ranks.memories[0], ranks.groups[0]
    x = torch.ones(4)
    with pytest.raises(ValueError, match="expected out with 2 parts of x"):
        _C.one_shot(x, torch.empty(4), memory, group, False, CONCATENATE)
    with pytest.raises(ValueError, match="expected out with 1 parts of x"):
        _C.one_shot(x[:3], torch.empty(1), memory, group, True, SUM)
    with pytest.raises(TypeError, match="out"):
        _C.one_shot(x, torch.empty(4, dtype=torch.bfloat16), memory, group, False, SUM)
    with pytest.raises(TypeError, match="x"):
        _C.one_shot(x.int(), x.int(), memory, group, False, SUM)
    with pytest.raises(ValueError, match="a group of 2 to 8 ranks, got 1"):
        _C.one_shot(x, x, memory, group[:5], False, SUM)
    with pytest.raises(ValueError, match="expected memory for 2 ranks"):
        _C.one_shot(x, x, memory[:64], group, False, SUM)
