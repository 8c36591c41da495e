"""Megatron-Core: its GPT on two ranks has the losses of one rank.

Over NCCL, Megatron's schedules and distributed optimizer are tested, too, with FP8 weights.
"""

from typing import Any

import pytest
from ranks import run_ranks

pytest.importorskip("megatron.core", reason="python -m pip install --no-deps megatron-core")
import megatron_training
from megatron_ranks import BOUNDS, LAYOUTS, PRECISIONS, STEPS, compared

pytestmark = pytest.mark.timeout(300)  # starting processes takes long on a busy machine


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the losses of all cases, for each rank."""
    return run_ranks(2, compared, backend=request.param)


def _check(
    found: list[dict[str, Any]], layout: str, precision: str, bound: float, steps: int
) -> None:
    for rank, outcome in enumerate(found):
        case = outcome[f"{layout}, {precision}"]
        assert not isinstance(case, str), case
        losses, expected = case
        assert len(losses) == (0 if layout == "PP2" and rank == 0 else steps)
        assert losses == pytest.approx(expected[: len(losses)], rel=bound)
        assert expected[-1] < 0.9 * expected[0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one(found: list[dict[str, Any]], layout: str, precision: str) -> None:
    _check(found, layout, precision, BOUNDS[precision], STEPS)


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """Returns the losses of Megatron's training, for each GPU."""
    return run_ranks(2, megatron_training.trained, backend="nccl")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", megatron_training.FP8)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_optimizer_and_schedules_train_as_on_one(
    trained: list[dict[str, Any]], layout: str, precision: str
) -> None:
    bound = megatron_training.BOUNDS[precision]
    _check(trained, layout, precision, bound, megatron_training.STEPS)
