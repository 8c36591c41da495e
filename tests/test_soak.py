"""The figures in docs/reliability.md, and how the soak tests judge their results."""

import importlib
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

SOAK = Path(__file__).parents[1] / "tools/soak"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of `tools/soak`, for this test only."""
    monkeypatch.syspath_prepend(str(SOAK))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in SOAK.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


def test_the_page_shows_the_last_figures(soak: Callable[[str], ModuleType]) -> None:
    table = soak("table")
    assert table.table() in table.PAGE.read_text(), "run python tools/soak/table.py"
    assert all(" 0 |" in line for line in table.table().splitlines()[2:]), "failures"


@pytest.mark.parametrize("writes", [False, True])
def test_figures_are_written_only_if_asked_for(
    soak: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    writes: bool,
) -> None:
    outcome, table = soak("outcome"), soak("table")
    monkeypatch.delenv("TE_SOAK_RESULTS", raising=False)
    for module in (outcome, table):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(table._BEGIN + table._END)
    monkeypatch.setattr(table, "PAGE", page)
    states = SimpleNamespace(run=lambda seconds, seed: outcome.Outcome("states", {"loads": 3}))
    monkeypatch.setitem(sys.modules, "states", states)
    arguments = ["soak", "states", "--seconds", "1", *(["--write"] if writes else [])]
    monkeypatch.setattr(sys, "argv", arguments)
    assert runpy.run_path(str(SOAK / "__main__.py"))["main"]() == 0
    assert ("3 loads" in page.read_text()) == writes
    assert (tmp_path / "states.json").exists() == writes


def test_what_jobs_find_is_added(soak: Callable[[str], ModuleType]) -> None:
    outcome = soak("outcome").Outcome
    found = outcome("name", {"calls": 2, "ms": 3.5}, ["one"])
    found.add(outcome("name", {"calls": 5, "ms": 1.5, "errors": 1}, ["two"]))
    assert found.figures == {"calls": 7, "ms": 3.5, "errors": 1}
    assert found.failures == ["one", "two"]


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("print('seed 7', flush=True); import os; os.abort()", 60.0, "with -6: seed 7"),
        ("import time; time.sleep(60)", 0.2, "with more than 0 s"),
    ],
)
def test_a_job_that_dies_or_hangs_is_a_failure(
    soak: Callable[[str], ModuleType], tmp_path: Path, code: str, seconds: float, said: str
) -> None:
    place = tmp_path / "0"
    with place.with_suffix(".txt").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output)
    (failure,) = soak("jobs")._end(process, seconds, place).failures
    assert said in failure


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "dtype", "expected", "actual", "differ"),
    [
        ("quantize", "uint8", [1] * 999, [1] * 998 + [2], 1),  # casts must be equal in all bits
        ("activation_forward", "uint8", [1] * 999, [1] * 996 + [2] * 3, 0),
        ("activation_forward", "uint8", [1] * 999, [1] * 900 + [2] * 99, 99),
        ("rope", "float32", [1.0, NAN, INF], [1.0001, NAN, INF], 0),
        ("rope", "float32", [1.0, NAN, INF], [1.001, INF, 1e30], 3),
        ("gemm", "float32", [1.0, 1.0], [1.001, 1.1], 1),
        ("norm_forward", "float32", [1.0, INF, -INF, INF], [1.0, NAN, INF, 1.0], 1),
        ("rope", "float16", [65000.0, INF], [65100.0, 65504.0], 0),
        ("rope", "float16", [2e-6, 0.0], [2.1e-6, 1e-4], 1),
    ],
)
def test_what_differs_between_cpu_and_gpu(
    soak: Callable[[str], ModuleType], name: str, dtype: str, expected: list, actual: list, differ
) -> None:
    ops, of = soak("ops"), {"dtype": getattr(torch, dtype)}
    said = ops._difference(name, [torch.tensor(expected, **of)], [torch.tensor(actual, **of)])
    if dtype == "uint8":
        assert said == (
            f"{differ / len(actual):.1%} of the codes of result 0 differ" if differ else ""
        )
    else:
        assert said == (f"{differ} of {len(actual)} elements of result 0 differ" if differ else "")


def test_kernels_are_told_by_name_and_first_parameter(soak: Callable[[str], ModuleType]) -> None:
    kernels = soak("kernels")
    defined = kernels.in_sources()
    assert len(defined) > 25
    here = "te::cuda::(anonymous namespace)::"
    for event, expected in {
        f"void {here}cast_kernel<float, __half>({here}Cast<float, __half>)": "cast.cu",
        f"void {here}cast_kernel<float, (bool)1>({here}CastArgs)": "quantize.cu",
        f"void {here}softmax_forward_kernel<te::X<1>>(te::BFloat16 const*, bool)": "softmax.cu",
    }.items():
        assert defined[kernels.launched(event)] == expected
    assert kernels.launched("void at::native::cast_kernel<float>(float*)") is None
