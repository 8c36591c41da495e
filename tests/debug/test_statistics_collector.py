"""The collector's buffer: micro-batches, schedules, weights, empty tensors, captured rows."""

import threading
import time
import warnings

import pytest
import torch
from statistics_reference import ALL, assert_statistics, reference
from statistics_session import Every, FakeManager, Session, moments_of

from transformer_engine.debug.statistics.buffer import CHUNK
from transformer_engine.debug.statistics.rows import Kind
from transformer_engine.debug.statistics.subscription import Source, Subscription
from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix


def _session(**layers) -> Session:
    return Session(FakeManager(layers or {"layer": moments_of(*ALL)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_statistic_of_micro_batches(device: str, dtype: torch.dtype) -> None:
    session = _session()
    parts = [torch.randn(rows, 48, device=device).mul(3).to(dtype) + 5 for rows in (1, 64, 7)]
    for part in parts:
        session.feed("layer", "activation", part)
    session.step()
    found = session.logged()
    assert list(found) == [(0, "layer", "activation")]
    assert list(found[0, "layer", "activation"]) == list(ALL)
    assert_statistics(found[0, "layer", "activation"], reference(*parts))


def test_std_survives_a_mean_of_a_hundred_deviations(device: str) -> None:
    session = _session()
    parts = [torch.randn(512, 512, device=device) + 100 for _ in range(2)]
    for part in parts:
        session.feed("layer", "activation", part)
    session.step()
    assert_statistics(session.logged()[0, "layer", "activation"], reference(*parts))


def test_steps_do_not_mix(device: str) -> None:
    session = _session()
    parts = [torch.full((4, 4), float(i), device=device) for i in range(5)]
    for part in parts:
        session.feed("layer", "gradient", part)
        session.step()
    found = session.logged()
    for iteration, part in enumerate(parts):
        assert_statistics(found[iteration, "layer", "gradient"], reference(part))


def test_cpu_statistics_are_logged_when_step_returns() -> None:
    session = _session()
    session.feed("layer", "activation", torch.ones(4))
    session.step()
    assert session.manager.logged


def test_of_weights_the_first_feed_of_a_step_counts(device: str) -> None:
    session = _session()
    first, second = torch.randn(32, 16, device=device), torch.randn(8, 16, device=device)
    for _ in range(2):
        session.feed("layer", "weight", first)
        session.feed("layer", "weight", second)
        session.step()
    for iteration in range(2):
        assert_statistics(session.logged()[iteration, "layer", "weight"], reference(first))


def test_every_schedule_is_its_own() -> None:
    session = _session(
        layer=[
            *moments_of("min", schedule=Every(freq=3)),
            *moments_of("max", schedule=Every(freq=2, start=2, end=5)),
        ],
        other=moments_of("mean", schedule=Every(freq=100)),
    )
    for _ in range(8):
        session.feed("layer", "activation", torch.ones(4))
        session.feed("other", "activation", torch.ones(4))
        session.step()
    found = {
        i: set(values) for (i, layer, _), values in session.logged().items() if layer == "layer"
    }
    assert found == {0: {"min"}, 2: {"max"}, 3: {"min"}, 4: {"max"}, 6: {"min"}}
    assert [i for i, layer, _ in session.logged() if layer == "other"] == [0]


def test_a_tensor_that_is_not_due_gives_no_row() -> None:
    session = _session(layer=moments_of("min", schedule=Every(freq=2, start=2)))
    tensor = session.collector.tensor("layer", "activation", torch.device("cpu"))
    assert tensor.moments_row() == (None, None)
    assert not tensor.due
    session.step()
    session.step()
    row, active = tensor.moments_row()
    assert row is not None and active is None


@pytest.mark.parametrize(
    ("schedules", "changes"),
    [
        ([Every()], [None] * 4),
        ([Every(freq=3)], [1, 3, 3, 4]),
        ([Every(start=1, end=2)], [1, 3, 3, None]),
        ([Every(freq=3), Every(start=1, end=1)], [1, 2, 3, 4]),
    ],
)
def test_next_change(schedules: list[Every], changes: list[int | None]) -> None:
    names = ("min", "max")
    requests = [
        s for n, e in zip(names, schedules, strict=False) for s in moments_of(n, schedule=e)
    ]
    session = _session(layer=requests)
    tensor = session.collector.tensor("layer", "activation", torch.device("cpu"))
    for iteration, expected in enumerate(changes):
        assert tensor.next_change(iteration) == expected
        session.step()


def test_layers_without_statistics_have_none() -> None:
    session = _session()
    assert session.collector.tensor("elsewhere", "activation", torch.device("cpu")) is None


def test_tensors_on_meta_have_none() -> None:
    session = _session()
    session.feed("layer", "activation", torch.ones(4, device="meta"))
    session.feed("layer", "activation", torch.ones(4))
    session.step()
    assert session.logged()[0, "layer", "activation"]["l1_norm"] == 4.0


def test_threads_that_run_a_layer_first_share_its_statistics() -> None:
    session = _session()
    subscriptions, began = session.collector.subscriptions, threading.Barrier(2)

    def slowly(layer: str, tensor: str) -> list[Subscription]:
        time.sleep(0.05)
        return subscriptions(layer, tensor)

    def run() -> None:
        began.wait()
        session.feed("layer", "activation", torch.ones(4))

    session.collector.subscriptions = slowly
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.step()
    assert session.logged()[0, "layer", "activation"]["l1_norm"] == 8.0


def test_empty_tensors_and_tensors_that_did_not_run(device: str) -> None:
    session = _session(ran=moments_of("min", "std"), idle=moments_of("min"))
    session.feed("ran", "activation", torch.empty(0, 16, device=device))
    session.collector.tensor("idle", "activation", torch.device(device))
    session.step()
    assert session.logged() == {(0, "ran", "activation"): {"min": None, "std": None}}
    session.feed("ran", "activation", torch.empty(0, 16, device=device))
    session.feed("ran", "activation", torch.ones(2, 16, device=device))
    session.step()
    assert session.logged()[1, "ran", "activation"] == {"min": 1.0, "std": 0.0}


def test_strides_and_other_dtypes(device: str) -> None:
    session = _session()
    x = torch.randn(16, 32, device=device, dtype=torch.float64)
    parts = [x.t(), x[::2, ::3].float(), torch.randn((), device=device)]
    for part in parts:
        session.feed("layer", "output", part)
    session.step()
    assert_statistics(
        session.logged()[0, "layer", "output"], reference(*[p.float() for p in parts])
    )


def test_more_tensors_than_a_chunk_holds(device: str) -> None:
    count = CHUNK + 3
    session = _session(**{f"layer.{i}": moments_of("max") for i in range(count)})
    rows = []
    for i in range(count):
        tensor = session.collector.tensor(f"layer.{i}", "activation", torch.device(device))
        rows.append(tensor.moments_row()[0])
        tensor.slots[next(iter(tensor.slots))].fed = False
    addresses = [row.data_ptr() for row in rows]
    for i in (0, CHUNK - 1, CHUNK, count - 1):
        session.feed(f"layer.{i}", "activation", torch.full((2,), float(i), device=device))
    session.step()
    found = {key[1]: values["max"] for key, values in session.logged().items() if values["max"]}
    assert found == {f"layer.{i}": float(i) for i in (CHUNK - 1, CHUNK, count - 1)}
    assert len(set(addresses)) == count


def test_captured_rows_follow_the_flag(device: str) -> None:
    session = _session(layer=moments_of("max", "l1_norm", schedule=Every(freq=2)))
    tensor = session.collector.tensor("layer", "activation", torch.device(device))
    row, active = tensor.moments_row(captured=True)
    for iteration in range(5):
        assert active.item() == (iteration % 2 == 0)
        assert tensor.moments_row(captured=True)[0].data_ptr() == row.data_ptr()
        x = torch.full((2,), iteration + 1.0, device=device)
        session.feed("layer", "activation", x, captured=True)
        session.step()
    values = {i: v["l1_norm"] for (i, _, _), v in session.logged().items()}
    assert values == {0: 2.0, 2: 6.0, 4: 10.0}


def test_a_captured_graph_goes_on_knowing_nothing_but_scales(device: str) -> None:
    """This is for FP8 weights: a replay runs no Python, so it cannot report lost statistics."""
    stats = [Subscription(name, Source(Kind.CASTS), name) for name in ("mse", "scale_inv_max")]
    session = _session(layer=stats)
    tensor = session.collector.tensor("layer", "weight", torch.device(device))
    codes = torch.full((16, 16), 56, dtype=torch.uint8, device=device)
    scales = torch.tensor([0.5, 2.0], device=device)
    tensor.feed_fp8_weight(Fp8Matrix(codes, scales, E4M3), torch.bfloat16, None, captured=True)
    (slot,) = tensor.slots.values()
    written = slot.row.clone()
    for _ in range(2):
        session.step()
        slot.row.copy_(written)  # as a replay does
    assert list(session.logged().values()) == [{"scale_inv_max": 0.5}] * 2


@pytest.mark.gpu
def test_a_captured_graph_takes_statistics_when_they_are_due() -> None:
    session = _session(layer=moments_of(*ALL, schedule=Every(freq=2)))
    x = torch.randn(64, 64, device="cuda")
    session.feed("layer", "activation", x)
    session.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        session.feed("layer", "activation", x, captured=True)
    expected = {}
    for iteration in range(1, 6):
        x.copy_(torch.randn_like(x))
        graph.replay()
        if iteration % 2 == 0:
            expected[iteration] = reference(x)
        session.step()
    found = session.logged()
    assert sorted(i for i, _, _ in found) == [0, 2, 4]
    for iteration, values in expected.items():
        assert_statistics(found[iteration, "layer", "activation"], values)


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    session = _session()
    x = torch.randn(256, 256, device="cuda")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            session.feed("layer", "activation", x)
            session.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(session.logged()) == 3


@pytest.mark.multi_gpu
def test_statistics_of_a_device_that_is_behind_the_current_one() -> None:
    session = _session(layer=moments_of("max"))
    with torch.cuda.device(1):
        torch.cuda._sleep(500_000_000)
    with torch.cuda.device(0):
        session.feed("layer", "activation", torch.ones(4, device="cuda:1"))
        session.step()
        assert session.logged() == {(0, "layer", "activation"): {"max": 1.0}}


def test_setting_the_training_step_moves_schedules() -> None:
    session = _session(layer=moments_of("max", schedule=Every(freq=10)))
    session.manager.iteration = 7
    session.collector.moved()
    session.feed("layer", "activation", torch.ones(2))
    session.step()
    for _ in range(4):
        session.feed("layer", "activation", torch.ones(2))
        session.step()
    assert list(session.logged()) == [(10, "layer", "activation")]


@pytest.mark.parametrize("due", [1000, 1001])
def test_what_was_taken_before_the_training_step_is_set_does_not_count(due: int) -> None:
    session = _session(layer=moments_of("l1_norm", schedule=Every(freq=due)))
    session.feed("layer", "activation", torch.full((4,), 100.0))
    session.manager.iteration = 1000
    session.collector.moved()
    for _ in range(2):
        session.feed("layer", "activation", torch.ones(4))
        session.step()
    assert session.logged() == {(due, "layer", "activation"): {"l1_norm": 4.0}}


def test_the_account_of_a_session(device: str) -> None:
    session = _session(layer=moments_of("max", schedule=Every(freq=2)))
    for _ in range(4):
        session.feed("layer", "activation", torch.ones(2, device=device))
        session.step()
    cost = session.collector.cost
    assert cost.steps == 2
    assert cost.bytes == (2 * 16 * 8 if device == "cuda" else 0)
    assert "2 steps" in str(cost)
