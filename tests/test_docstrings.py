"""Runs the examples in docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONS = doctest.ELLIPSIS
PACKAGES = {
    "transformer_engine.pytorch.export.onnx": ("onnx", "onnxscript"),
    "nvdlfw_inspect.report.table": ("rich",),
    "nvdlfw_inspect.report.advice": ("jinja2",),
}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("transformer_engine", "nvdlfw_inspect")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, while it exports
@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    for package in PACKAGES.get(module, ()):
        pytest.importorskip(package)
    found = doctest.testmod(importlib.import_module(module), optionflags=OPTIONS)
    assert found.failed == 0
