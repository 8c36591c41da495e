"""Fixtures and GPU skipping for all tests; those without torch also run where it is missing."""

import os
import random

import pytest
from garbage import collect_seldom

# Threads that spin while they wait take the processor from other processes of this machine: with
# six of them busy, tests of small models took up to fifteen times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

try:
    import torch
except ModuleNotFoundError:
    torch = None

GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}
SAMPLED = 8  # one in so many cases of a `sampled_on_cpu` test runs on machines without a GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch else 0
    for item in items:
        for name, least in GPUS_NEEDED.items():
            marker = item.get_closest_marker(name)
            needed = marker.args[0] if marker and marker.args else least
            if marker and found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {found}"))
    if not found:
        _skip_most_sampled([item for item in items if not item.get_closest_marker("skip")])


def pytest_collection_finish() -> None:
    collect_seldom()


def _skip_most_sampled(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled_on_cpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, own in cases.items():
        parts = own[0].get_closest_marker("sampled_on_cpu").args
        others = [item for item in own if not any(part in item.name for part in parts)]
        if len(others) == len(own):
            others = random.Random(test).sample(own, len(own) * (SAMPLED - 1) // SAMPLED)
        for item in others:
            item.add_marker(pytest.mark.skip(reason="a sample runs on machines without a GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    if torch:
        torch.manual_seed(0)
