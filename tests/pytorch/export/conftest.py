"""Torch's registry of ONNX operators, built once for all exports."""

import copy
import functools
from typing import Any

import pytest


@pytest.fixture(scope="session")
def _operators_of_onnx() -> Any:
    """The registry of each version; torch would build it for each export, in about a second."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: PLC0415
    except ImportError:  # other releases of torch: exports are slower
        return None
    return ONNXRegistry, functools.cache(ONNXRegistry.from_torchlib)


@pytest.fixture(autouse=True)
def _made_once(_operators_of_onnx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if _operators_of_onnx is None:
        return
    registry, made = _operators_of_onnx

    def copied(*version: Any, **options: Any) -> Any:
        found = copy.copy(made(*version, **options))
        found.functions = {name: list(ways) for name, ways in found.functions.items()}
        return found

    monkeypatch.setattr(registry, "from_torchlib", staticmethod(copied))
