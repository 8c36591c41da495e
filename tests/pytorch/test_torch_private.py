"""Private names of torch: none is missing, and layers also train without them."""

import subprocess
import sys

import pytest
import torch
from checkpoint_helpers import MODES, uncheckpointed
from rulers import assert_equal
from torch.torch_version import TorchVersion

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import _torch_private
from transformer_engine.pytorch.fp8 import recompute_regions as regions

TRAIN = """
import torch, transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
torch.manual_seed(0)
layer = te.TransformerLayer(32, 64, 2, hidden_dropout=0, attention_dropout=0, device="cpu")
x = torch.randn(16, 2, 32, requires_grad=True)
for _ in range(2):
    with te.fp8_autocast(fp8_recipe=DelayedScaling()):
        y = te.checkpoint(layer, layer(x))
    y.sum().backward()
print(torch.stack([p.grad.double().sum() for p in (x, *layer.parameters())]).tolist())
"""
WITHOUT = """
import pkgutil, torch
resolve = pkgutil.resolve_name
def lacking(path):
    if path.startswith("torch"):
        raise AttributeError(path)
    return resolve(path)
pkgutil.resolve_name = lacking
"""


def output_of(program):
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_none_is_missing():
    if TorchVersion(torch.__version__) < TorchVersion("2.8"):
        pytest.skip("the file says what older ones lack")
    assert set(_torch_private.MISSING) <= {"torch:_C._cuda_getDevice"}  # only CUDA builds have it


def test_layers_train_alike_without_any(capsys):
    exec(TRAIN, {})
    assert output_of(WITHOUT + TRAIN) == capsys.readouterr().out


@pytest.fixture
def unreadable(monkeypatch):
    """Torch's records have other names, and functions cannot be found on the stack."""
    others = {hook: "another" for hook in _torch_private._RECORDS}
    monkeypatch.setattr(_torch_private, "_RECORDS", others)
    monkeypatch.setattr(regions, "functions_in_forward", lambda: iter(()))


def train(wrap, recipe=None):
    torch.manual_seed(0)
    layer = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(2):
        with te.fp8_autocast(recipe is not None, fp8_recipe=recipe):
            y = wrap(layer, x)
        y.square().sum().backward()
    return [y, x.grad, layer.weight.grad]


@pytest.mark.parametrize("mode", ["torch", "torch not reentrant"])
def test_checkpoints_of_torch_that_cannot_be_read(unreadable, mode):
    """They are refused in FP8, because the recompute would run in another precision."""
    assert_equal(train(MODES[mode]), train(uncheckpointed))
    with pytest.raises(RuntimeError, match=r"use transformer_engine\.pytorch\.checkpoint"):
        train(MODES[mode], Float8CurrentScaling())


def test_checkpoints_of_ours_need_no_record_of_torch(unreadable):
    wrap = MODES["te not reentrant"]
    assert_equal(train(wrap, DelayedScaling()), train(uncheckpointed, DelayedScaling()))
