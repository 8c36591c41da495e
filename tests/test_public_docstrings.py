"""`help()` of public names: every argument, an example, and no reference to source files."""

import inspect
import re
import types

import pytest

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

# Names without an example, and the reason or the place of an example.
WITHOUT_EXAMPLE = {
    "ConversionReport": "shown by convert",
    "Float8BlockQuantizer": "shown by Float8BlockwiseQTensor",
    "QuantizedTensor": "a base",
    "QuantizedTensorStorage": "QuantizedTensor",
    "Quantizer": "a base",
    "get_cudnn_version": "needs a GPU",
    "get_device_compute_capability": "needs a GPU",
    "make_graphed_callables": "needs a GPU",
}
# Enumerations, and classes whose objects other functions make.
WITHOUT_ARGUMENTS = {
    *("ConversionReport", "DType", "ManualOffloadSynchronizer", "UserBufferQuantizationMode"),
    *("QuantizedTensor", "QuantizedTensorStorage"),
}
PUBLIC = {
    **{name: getattr(te, name) for name in te.__all__},
    **{name: getattr(recipe, name) for name in dir(recipe) if name.endswith("Scaling")},
}
NAMES = [name for name, thing in PUBLIC.items() if not isinstance(thing, types.ModuleType)]
CALLS = {
    **{name: PUBLIC[name] for name in NAMES if name not in WITHOUT_ARGUMENTS},
    **{f"{name}.forward": PUBLIC[name].forward for name in NAMES if "forward" in dir(PUBLIC[name])},
    **{
        f"debug_api.{name}": getattr(debug_api, name)
        for name in ("initialize", "initialize_training_step", "log_message", "show", "step")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(CALLS[name]) or ""
    parameters = [one for one in inspect.signature(CALLS[name]).parameters if one != "self"]
    missing = [one for one in parameters if not re.search(rf"^\s*\*{{0,2}}{one}: ", text, re.M)]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_there_is_an_example_and_no_way_into_the_source(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert ">>>" in text or name in WITHOUT_EXAMPLE
    assert not re.search(r"see `\w+\.py`", text)
