"""A recording adds up the column sums of all its calls by one kernel, at its end."""

import pytest
import torch
from precisions import scope
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.pytorch.chain import segments

pytestmark = pytest.mark.gpu

KERNEL = "add_column_parts_kernel"


def layer():
    torch.manual_seed(0)
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    return te.TransformerLayer(128, 512, 2, device="cuda", **settings)


def step(module, rows):
    """The input's gradient and those of the parameters."""
    torch.manual_seed(1)
    x = torch.randn(rows, 2, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    with scope("delayed"):
        out = module(x)
    out.backward(torch.randn_like(out))
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return gradients


def launches(profile):
    return sum(event.count for event in profile.key_averages() if KERNEL in event.key)


def test_one_launch():
    module = layer()
    step(module, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(module, 64)
    assert launches(profile) == 1


@pytest.mark.parametrize("rows", [16, 4096])
def test_memory_that_grows(rows, monkeypatch):
    """On a new stream there is no memory for partial sums yet, so that of the first call grows."""
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_segments_of", lambda *_: [])
        expected = step(layer(), rows)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = step(layer(), rows)
    stream.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert_bitwise(one, other)
