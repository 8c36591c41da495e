"""Helpers that export a model by `onnx_export` and run its graph in onnxruntime."""

import pytest
import torch
from packaging.version import Version
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

RECIPES = {
    "fp32": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
}
HIDDEN, FFN, HEADS = 64, 128, 4


def scope(recipe):
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)


def trained(model, inputs, recipe):
    """Trains two steps, so that scales are no longer the initial ones, and returns the model."""
    for _ in range(2):
        with scope(recipe):
            loss = sum(y.float().square().sum() for y in listed(model(*inputs)))
        if loss.requires_grad:
            loss.backward()
    return model.eval()


def listed(results):
    return results if isinstance(results, tuple) else (results,)


def export(model, inputs, recipe=None, dynamic=({0: "batch", 1: "sequence"},), **options):
    with scope(recipe), te.onnx_export(enabled=True):
        return torch.onnx.export(
            model, inputs, dynamic_shapes=dynamic, verbose=False, **options
        ).model_proto


# Before 1.32, onnxruntime treats float8 as int8 when it fuses operators.
FUSES_FLOAT8 = Version(onnxruntime.__version__) < Version("1.32")


def run(proto, inputs):
    """Returns the results of onnxruntime; fusions that break float8 are disabled."""
    options = onnxruntime.SessionOptions()
    if FUSES_FLOAT8:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    names = [one.name for one in session.get_inputs()]
    feeds = {name: x.cpu().numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def check(
    model,
    inputs,
    others,
    recipe=None,
    dynamic=({0: "batch", 1: "sequence"},),
    bound=1e-5,
    **options,
):
    """Exports with `inputs`, and compares the results on inputs of other sizes."""
    device = next(model.parameters(), inputs[0]).device
    inputs, others = (tuple(x.to(device) for x in some) for some in (inputs, others))
    trained(model, inputs, recipe)
    proto = export(model, inputs, recipe, dynamic, **options)
    onnx.checker.check_model(proto, full_check=True)
    with torch.no_grad(), scope(recipe):
        expected = listed(model(*others))
    for got, want in zip(run(proto, others), expected, strict=True):
        assert got.dtype == want.dtype
        # In FP8 a value between two codes may round to either, because x / (1 / scale) is not
        # exactly x * scale. Tensor cores add FP8 products in a short accumulator.
        in_fp8 = 2e-3 if device.type == "cpu" else 1e-2
        allowed = (bound if recipe is None else max(bound, in_fp8)) * want.double().norm().cpu()
        assert (got.double() - want.double().cpu()).norm() <= allowed
    return proto


class Calls(nn.Module):
    """Calls attention modules with their keyword arguments."""

    def __init__(self, *calls):
        super().__init__()
        self.several = nn.ModuleList(module for module, _ in calls)
        self.keywords = [keywords for _, keywords in calls]

    def forward(self, *inputs):
        return tuple(
            module(*inputs, **keywords)
            for module, keywords in zip(self.several, self.keywords, strict=True)
        )


def error_of(model, inputs, recipe=None, kind=torch.onnx.errors.OnnxExporterError):
    with pytest.raises(kind) as caught:
        export(model, inputs, recipe, None)
    return str(caught.value)
