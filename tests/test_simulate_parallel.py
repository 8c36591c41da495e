"""The simulation of many GPUs, for cases whose result is known."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools/simulate_parallel.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("simulate_parallel", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_parallel"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def simulation(tool: Any) -> Any:
    """A simulation of a layer with one exposed collective, and one that overlaps with GEMMs."""

    def both(bytes_an_element: float) -> list[Any]:
        return [
            tool.Collective("gather", "bfloat16", bytes_an_element, False),
            tool.Collective("scatter", "bfloat16", bytes_an_element, True),
        ]

    schedules = {(tp, False): both(2 * (tp - 1) / tp) for tp in (2, 4, 8)}
    return tool.Simulation(tool.SHAPES[0], tool.PRECISIONS[0], schedules, tool.Measured())


def test_two_gpus_take_what_was_measured(simulation: Any) -> None:
    _, found = simulation.step(2, 2)
    assert found == pytest.approx(simulation.measured, rel=1e-9)


def test_collectives_move_what_they_say(tool: Any, simulation: Any) -> None:
    whole = tool.tensor_parallel_ms(simulation.schedules[2, False], simulation.shape, 1e9)
    assert whole == pytest.approx(2 * 4096 * 16384 / 1e9 * 1e3)


def test_weights_are_waited_for_where_they_take_longer_than_computing(tool: Any) -> None:
    shape = tool.SHAPES[0]
    gather = shape.weights / 2 / tool.NVLINK * 1e3  # one byte per weight, between two GPUs
    assert tool.sharded_ms(shape, 2, 1, 2, compute=1e3) == 0.0
    assert tool.sharded_ms(shape, 2, 1, 2, compute=0.0) == pytest.approx(6 * gather)
    within, across = (tool.sharded_ms(shape, 2, 4, gpus, compute=0.0) for gpus in (8, 16))
    assert across > within  # across nodes, against within one


def test_more_ranks_of_a_layer_are_less_efficient(simulation: Any) -> None:
    assert simulation.efficiency(1, 8) == (1.0, 1.0)
    assert simulation.exposed > 0.0
    found = [simulation.efficiency(tp, 8) for tp in (4, 8)]
    assert found == sorted(found, reverse=True)
    assert all(1.0 >= one > other for one, other in found)
