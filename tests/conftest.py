"""Fixtures for all tests, and the choice of tests that can run on this machine.

Tests that need more GPUs than there are do not reach pytest's skipping: to skip thousands of tests
one by one would take half a minute. They are counted as skipped. Tests that need no torch also run
without torch.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from garbage import collect_seldom

# Threads that spin while they wait slow down other processes of this machine: with six busy
# processes, tests of small models took up to fifteen times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

try:
    import torch
except ModuleNotFoundError:
    torch = None

GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}
WITHOUT_GPUS = pytest.StashKey[dict[str, int]]()  # number of tests that are left out, by reason
SAMPLED = 8  # without a GPU, one of this many cases of a `sampled_on_cpu` test runs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch else 0
    needed = [_gpus_needed(item) for item in items]
    too_many = Counter(number for number in needed if number > found)
    config.stash[WITHOUT_GPUS] = {f"needs {n} GPU(s), found {found}": too_many[n] for n in too_many}
    items[:] = [item for item, number in zip(items, needed, strict=True) if number <= found]
    if not found:
        _skip_most_sampled([item for item in items if not item.get_closest_marker("skip")])


def _gpus_needed(item: pytest.Item) -> int:
    needed = 0
    for name, least in GPUS_NEEDED.items():
        if marker := item.get_closest_marker(name):
            needed = marker.args[0] if marker.args else least
    return needed


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # of an xdist worker
    if output is not None:
        output["without_gpus"] = session.config.stash.get(WITHOUT_GPUS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the counts of one xdist worker, because all workers collect the same tests."""
    node.config.stash[WITHOUT_GPUS] = getattr(node, "workeroutput", {}).get("without_gpus", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for reason, count in config.stash.get(WITHOUT_GPUS, {}).items():
        place = ("tests", None, "")
        skipped = ("tests", 0, f"Skipped: {reason}")
        report = pytest.TestReport("tests", place, {"skip": 1}, "skipped", skipped, "setup")
        terminalreporter.stats.setdefault("skipped", []).extend([report] * count)


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
    """Each device type in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    if torch and torch.cuda.is_available():
        torch.manual_seed(0)
    elif torch:  # manual_seed would format a stack for missing devices, which takes milliseconds
        torch.default_generator.manual_seed(0)
