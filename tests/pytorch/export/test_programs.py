"""Programs of `torch.export` run in other processes, and do not change their models."""

import copy
import io

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.chain import compiled

AUTO = torch.export.Dim.AUTO
# Torch 2.12 and older warn that the bytes which they load are not writable.
pytestmark = pytest.mark.filterwarnings("ignore:.*buffer is not writable:UserWarning")


class InScope(nn.Module):
    """A module that enters an autocast in its forward."""

    def __init__(self, module, recipe):
        super().__init__()
        self.module, self.recipe = module, recipe

    def forward(self, x):
        with te.fp8_autocast(enabled=self.recipe is not None, fp8_recipe=self.recipe):
            return self.module(x)


def trained(module, recipe, x):
    model = InScope(module, recipe)
    for _ in range(2):
        model(x).square().sum().backward()
    with te.fp8_autocast():  # runs the deferred updates of scales
        pass
    return model


def attention_in_fp8():
    return te.MultiheadAttention(64, 4, attn_mask_type="causal", attention_dropout=0, device="cpu")


def casts(**settings):
    return te.ops.Sequential(te.ops.Quantize(**settings), te.Linear(64, 64, device="cpu"))


@pytest.mark.filterwarnings("ignore:.*side effects.*:UserWarning")  # from the autocast
@pytest.mark.parametrize(
    ("module", "recipe", "strict"),
    [
        (te.Linear(64, 32, device="cpu"), None, False),
        (te.LayerNormMLP(64, 128, device="cpu"), DelayedScaling(amax_history_len=4), True),
        (attention_in_fp8(), DelayedScaling(amax_history_len=4, fp8_dpa=True), False),
        (te.TransformerLayer(64, 128, 4, device="cpu"), Float8CurrentScaling(), False),
        (casts(), DelayedScaling(amax_history_len=4), True),
        (casts(), Float8CurrentScaling(), False),
        (casts(), Float8BlockScaling(), True),
        (casts(forward=False, backward=True), Float8CurrentScaling(), True),
    ],
    ids=[
        "linear",
        "delayed",
        "attention",
        "layer",
        "casts delayed",
        "casts",
        "casts of blocks",
        "casts of gradients",
    ],
)
def test_another_process_runs_a_saved_program(module, recipe, strict, monkeypatch):
    model = trained(module, recipe, torch.randn(16, 2, 64)).eval()
    x, other = torch.randn(16, 2, 64), torch.randn(32, 4, 64)
    file = io.BytesIO()
    sizes = ({0: AUTO, 1: AUTO},)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=strict)
    torch.export.save(program, file)
    monkeypatch.setattr(compiled, "_OPERATORS", compiled._Operators())  # another process has none
    file.seek(0)
    program = torch.export.load(file).module()
    with torch.no_grad():
        assert torch.equal(program(other), model(other))


@pytest.mark.parametrize(
    "module",
    [attention_in_fp8(), casts()],
    ids=["attention", "casts"],
)
def test_programs_change_no_scales(module):
    """Programs run with gradients and without."""
    recipe, x = DelayedScaling(amax_history_len=4, fp8_dpa=True), torch.randn(16, 2, 64)
    model = trained(module, recipe, x)
    before = [copy.deepcopy(one.scaling) for one in model.modules() if hasattr(one, "scaling")]
    with torch.no_grad():
        program = torch.export.export(model, (x,)).module()
    program(100 * x)
    with torch.no_grad(), te.fp8_autocast():  # would run deferred updates
        program(100 * x)
    after = [one.scaling for one in model.modules() if hasattr(one, "scaling")]
    for old, new in zip(before, after, strict=True):
        for direction, state in old.items():
            assert torch.equal(state.scale, new[direction].scale)
            assert torch.equal(state.amax_history, new[direction].amax_history)


def test_operators_of_another_process():
    with pytest.raises(RuntimeError, match="operator of another process"):
        torch.ops.te.chain("of elsewhere", [torch.ones(2)], [])


@pytest.mark.parametrize("fp8", [False, True])
def test_programs_with_gradients_train(fp8):
    """In the process that exported them; torch.distributed.pipelining trains such programs."""
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    model, x = nn.Sequential(nn.Linear(64, 64), layer), torch.randn(16, 2, 64)
    found = []
    with te.fp8_autocast(enabled=fp8, fp8_recipe=Float8CurrentScaling()):
        program = torch.export.export(model, (x,)).module()
        for run in (program, model):
            model.zero_grad()
            run(x).square().sum().backward()
            found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_programs_with_gradients_name_their_process(monkeypatch):
    x = torch.randn(16, 32)
    program = torch.export.export(te.Linear(32, 32, device="cpu"), (x,)).module()
    monkeypatch.setattr(compiled, "_OPERATORS", compiled._Operators())
    with pytest.raises(RuntimeError, match=r"has made under torch\.no_grad"):
        program(x)
