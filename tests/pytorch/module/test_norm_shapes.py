"""Norms over several axes, as torch's norms with a `normalized_shape` of several sizes."""

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te

PAIRS = [(te.LayerNorm, nn.LayerNorm), (te.RMSNorm, nn.RMSNorm)]
SHAPE = (3, 4, 8)


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p)
    return module


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_results_and_gradients(ours, torchs, compiled: bool, device: str) -> None:
    reference = filled(torchs(SHAPE, eps=1e-5)).to(device)
    module = ours(normalized_shape=SHAPE, eps=1e-5, device=device)
    module.load_state_dict(reference.state_dict(), strict=False)
    assert {p.shape for p in module.parameters()} == {torch.Size(SHAPE)}
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    x = torch.randn(5, 2, *SHAPE, device=device)
    found, expected = [], []
    for norm, tensors in ((call, found), (reference, expected)):
        own = x.clone().requires_grad_()
        y = norm(own)
        y.square().sum().backward()
        tensors += [y, own.grad]
    found += [p.grad for p in module.parameters()]
    expected += [p.grad for p in reference.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "_"), PAIRS)
def test_is_the_norm_over_the_flattened_axes(kind, _, device: str) -> None:
    several = filled(kind(SHAPE, zero_centered_gamma=True, device=device))
    flat = kind(96, zero_centered_gamma=True, device=device)
    with torch.no_grad():
        for own, other in zip(flat.parameters(), several.parameters(), strict=True):
            own.copy_(other.flatten())
    x = torch.randn(7, *SHAPE, device=device).transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise(several(x).flatten(1), flat(x.flatten(1)))
    assert several(x).shape == x.shape


def test_torchs_norms_are_converted(device: str) -> None:
    model = nn.Sequential(filled(nn.LayerNorm(SHAPE))).to(device)
    x = torch.randn(5, *SHAPE, device=device)
    expected = model(x)
    te.convert(model)
    assert type(model[0]) is te.LayerNorm
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert "(3, 4, 8), eps=1e-05" in repr(model[0])


def test_errors() -> None:
    norm = te.LayerNorm(SHAPE, device="cpu", name="n")
    for bad in ((5, 3, 4, 9), (3, 3, 8), (8,)):
        with pytest.raises(ValueError, match=r"\[LayerNorm\] expected inp of shape \(\.\.\., "):
            norm(torch.zeros(bad))
    with pytest.raises(ValueError, match=r"expected at least one size, got \(\)"):
        te.RMSNorm((), device="cpu")
    with pytest.raises(ValueError, match="hidden_size"):
        te.RMSNorm((4, 0), device="cpu")
