"""lightning, accelerate and the Trainer of transformers on two ranks, with DDP and fully_shard."""

from importlib.util import find_spec
from typing import Any

import pytest
from client_ranks import RUNS, trained
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)  # starting processes takes long on a busy machine

NEEDS = {"lightning": "lightning", "accelerate": "accelerate", "Trainer": "transformers"}
# Bounds of losses: two ranks sum in another order, and their first gradient scales differ.
BOUNDS = {"fp32": 1e-6, "fp8": 1e-3}


def _is_installed(name: str) -> bool:
    return (
        find_spec(NEEDS[name.split(maxsplit=1)[0]]) is not None
        and find_spec("accelerate") is not None
    )


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the losses of all trainers, for each rank."""
    names = [name for name in RUNS if _is_installed(name)]
    return run_ranks(2, trained, names, backend=request.param) if names else []


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_process(
    found: list[dict[str, Any]], name: str, precision: str
) -> None:
    if not _is_installed(name):
        pytest.skip(f"{name.split(maxsplit=1)[0]} is not installed")
    for outcome in found:
        case = outcome[f"{name}, {precision == 'fp8'}"]
        assert not isinstance(case, str), case
        losses, expected = case
        assert losses == pytest.approx(expected, rel=BOUNDS[precision])
        assert losses[-1] < 0.9 * losses[0]
