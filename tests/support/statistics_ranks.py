"""What each rank of distributed/test_statistics_reduction runs: statistics over two ranks."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from debug_session import debugging, inspect, logged, section
from rank_device import here
from statistics_reference import ALL
from statistics_session import Every, FakeManager, Session, moments_of

import nvdlfw_inspect.api as debug_api
from transformer_engine.debug.statistics.pending import PendingCopy

Outcome = Any
LAYER = {"layer": moments_of(*ALL)}


def parts_of(rank: int) -> list[torch.Tensor]:
    """Returns the micro-batches of a rank, of unequal sizes."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ((100, 3, 1), (7,))[rank]
    parts = [torch.randn(n, 8, generator=generator) + 10 * rank for n in sizes]
    return [part.to(here()) for part in parts]


def _known(session: Session, *layers: str) -> None:
    for layer in layers:
        session.collector.tensor(layer, "activation", here())


def unequal_micro_batches(rank: int) -> Outcome:
    session = Session(FakeManager(LAYER))
    for part in parts_of(rank):
        session.feed("layer", "activation", part)
    session.step()
    return session.logged()


def a_rank_without_tensors(rank: int) -> Outcome:
    session = Session(FakeManager(LAYER))
    _known(session, "layer")
    if rank == 0:
        for part in parts_of(rank):
            session.feed("layer", "activation", part)
    session.step()
    return session.logged()


def layers_in_another_order(rank: int) -> Outcome:
    session = Session(FakeManager({"a": moments_of("max"), "b": moments_of("max")}))
    for layer in ("ab", "ba")[rank]:
        session.feed(layer, "activation", torch.full((2,), ord(layer) + 10.0 * rank, device=here()))
    session.step()
    return {key[1]: values["max"] for key, values in session.logged().items()}


def weights(rank: int) -> Outcome:
    """Weights of a tensor-parallel group, with the reduction switched off, and without a group."""
    outcome = {}
    group = dist.new_group([0, 1])
    for name, tp_group, tp_size, reduced in (
        ("together", group, 2, True),
        ("switched off", group, 2, False),
        ("no group", None, 2, True),
        ("one rank", None, 1, True),
    ):
        session = Session(FakeManager(LAYER, text=Every(start=100)))
        session.collector.weights_over_tp_group = reduced
        x = parts_of(rank)[0]
        found = session.collector.tensor("layer", "weight", x.device, tp_group, tp_size)
        for _ in range(2):
            found.feed_moments(x)
        session.step()
        outcome[name] = session.logged()[0, "layer", "weight"]
    return outcome


def copies_of_a_layer_that_runs_later(rank: int) -> Outcome:
    """In step 0, only rank 0 runs the layer, whose tensor both ranks have alike."""
    manager = FakeManager({"layer": moments_of("l1_norm")})
    manager.layer_names = {"layer"}
    session, group = Session(manager), dist.new_group([0, 1])
    for iteration in range(3):
        if rank == 0 or iteration:
            found = session.collector.tensor("layer", "activation", here(), group, 2, True)
            found.feed_moments(torch.ones(4, device=here()))
        session.step()
    return [values["l1_norm"] for values in session.logged().values()]


def a_rank_that_has_run_nothing(rank: int) -> Outcome:
    """From step 1 on, rank 0 runs a layer; rank 1 knows it, and runs it in step 3."""
    manager = FakeManager({"layer": moments_of("max")})
    manager.layer_names = {"layer"}
    session = Session(manager)
    for iteration in range(4):
        if iteration and (rank == 0 or iteration == 3):
            x = torch.full((2,), iteration + 10.0 * rank, device=here())
            session.feed("layer", "activation", x)
        session.step()
    return {step: values["max"] for (step, _, _), values in session.logged().items()}


def steps_between(rank: int) -> Outcome:
    """Only every second step is due. In step 4, only rank 0 feeds a tensor."""
    session = Session(
        FakeManager({"layer": moments_of("l1_norm", schedule=Every(2))}, text=Every(2))
    )
    _known(session, "layer")
    for iteration in range(5):
        if rank == 0 or iteration != 4:
            session.feed("layer", "activation", torch.ones(4 + iteration, device=here()))
        session.step()
    collectives = session.collector.cost.collectives
    return {i: v["l1_norm"] for (i, _, _), v in session.logged().items()}, collectives


def layers_that_come_later(rank: int) -> Outcome:
    """Feeds more layers than the first collective had room for."""
    layers = {f"layer.{i}": moments_of("max") for i in range(100)}
    session = Session(FakeManager(layers))
    for count in (1, 100, 100):
        for i in range(count):
            session.feed(
                f"layer.{i}", "activation", torch.full((2,), float(i + rank), device=here())
            )
        session.step()
    found = session.logged()
    return {i: v["max"] for (step, name, _), v in found.items() if step == 2 for i in [name]}


def different_layers(rank: int) -> Outcome:
    layers = ({"a": moments_of("max"), "both": moments_of("max")}, {"both": moments_of("max")})
    session = Session(FakeManager(layers[rank], config_hash=rank))
    for layer in layers[rank]:
        session.feed(layer, "activation", torch.ones(2, device=here()))
    try:
        session.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def different_layers_later(rank: int) -> Outcome:
    session = Session(FakeManager({"a": moments_of("max"), "b": moments_of("max")}))
    try:
        for iteration in range(3):
            session.feed("a", "activation", torch.ones(2, device=here()))
            if rank == 0 and iteration:
                session.feed("b", "activation", torch.ones(2, device=here()))
            session.step()
    except RuntimeError as error:
        return f"{iteration}: {error}"
    return "no error"


def a_logger_that_fails(rank: int) -> Outcome:
    """The logger of rank 0 fails once, while the copies of a step arrive in the next one."""
    session = Session(FakeManager({"layer": moments_of("max")}))
    log, errors = session.manager.log_statistics, []
    arrived = PendingCopy.is_ready

    def failing(iteration: int, *more: Any) -> None:
        log(iteration, *more)
        if rank == iteration == 0:
            raise OSError("disk is full")

    session.manager.log_statistics = failing
    with patch.object(PendingCopy, "is_ready", lambda copy, wait: wait and arrived(copy, wait)):
        for iteration in range(3):
            session.feed("layer", "activation", torch.full((2,), iteration + 1.0, device=here()))
            try:
                session.step()
            except (OSError, RuntimeError) as error:
                errors.append(str(error))
        session.collector.drain()
    return errors, [values["max"] for values in session.logged().values()]


def _step(folder: Path, pattern: str, x: torch.Tensor) -> str:
    """Runs a real session that feeds the tensors of two layers."""
    config = section("LogTensorStats", pattern, tensors=["activation"], stats=list(ALL))
    with debugging(folder, config):
        for layer in ("a", "b"):
            inspect(layer, "activation", x)
        try:
            debug_api.step()
        except RuntimeError as error:
            return str(error)
    return "no error"


def a_session(rank: int, folder: Path) -> Outcome:
    assert _step(folder, "a", parts_of(rank)[0]) == "no error"
    return logged(folder, rank)


def a_session_with_different_layers(rank: int, folder: Path) -> Outcome:
    return _step(folder, "ab"[rank], parts_of(rank)[0])


def a_scalar(rank: int, folder: Path) -> Outcome:
    config = section("LogTensorStats", tensors=["loss"], stats=["min", "max"])
    config["base"] = config.pop("transformer_engine")
    with debugging(folder, config):
        logged = debug_api.log_tensor_stats(
            layer_name="head",
            tensor_name="loss",
            tensor=torch.tensor(rank + 1.0, device=here()),
            reduction_group=dist.group.WORLD,
        )
    return {name: float(value) for name, value in logged.items()}


SESSIONS = (a_session, a_session_with_different_layers, a_scalar)
SCENARIOS = (
    unequal_micro_batches,
    a_rank_without_tensors,
    layers_in_another_order,
    weights,
    copies_of_a_layer_that_runs_later,
    a_rank_that_has_run_nothing,
    steps_between,
    layers_that_come_later,
    different_layers,
    different_layers_later,
    a_logger_that_fails,
)
