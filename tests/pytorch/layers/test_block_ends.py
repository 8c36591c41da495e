"""The last operations of a layer's blocks: bias, dropout and residual in one pass, drop path."""

import pytest
import torch
from cases.dropout_add import threshold

from transformer_engine.pytorch.layers.drop_path import DropPath
from transformer_engine.pytorch.module.residual import Residual


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_add(device, p, with_bias):
    x, residual = (torch.randn(400, 16, device=device, requires_grad=True) for _ in range(2))
    bias = torch.randn(16, device=device, requires_grad=True) if with_bias else None
    out = Residual()(x, residual, p, bias)
    whole = x if bias is None else x + bias
    branch = (out - residual).detach()
    mask = branch.abs() > 1e-6 if p else torch.ones_like(x, dtype=torch.bool)
    assert float(mask.float().mean()) == pytest.approx(1 - p, abs=0.03)
    dropped = threshold(p) / 2**16
    torch.testing.assert_close(branch, whole * mask / (1 - dropped), rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected = upstream * mask / (1 - dropped)
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(residual.grad, upstream)
    if bias is not None:
        torch.testing.assert_close(bias.grad, expected.sum(0), rtol=1e-4, atol=1e-4)


def test_dropout_add_in_the_dtype_of_the_residual(device):
    x = torch.randn(8, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(8, 16, device=device, requires_grad=True)
    for p in (0.0, 0.5):
        out = Residual()(x, residual, p)
        assert out.dtype is torch.float32
        x_grad, residual_grad = torch.autograd.grad(out.sum(), (x, residual))
        assert x_grad.dtype is torch.bfloat16
        assert residual_grad.dtype is torch.float32


@pytest.mark.parametrize(("shape", "dim"), [((40, 3), 0), ((3, 40, 2), 1)], ids=str)
def test_drop_path_drops_whole_samples(device, shape, dim):
    module = DropPath(0.25, dim)
    x = torch.ones(shape, device=device)
    ratio = module(x).transpose(0, dim).flatten(1)
    torch.testing.assert_close(ratio.unique().cpu(), torch.tensor([0.0, 1 / 0.75]))
    assert torch.equal(ratio, ratio[:, :1].expand_as(ratio))
    assert torch.equal(module.eval()(x), x)


def test_drop_path_drops_all():
    assert not DropPath(1.0)(torch.ones(5, 3)).any()
    with pytest.raises(ValueError, match=r"0 <= drop_prob <= 1, got 1.5"):
        DropPath(1.5)


def test_drop_path_of_packed_sequences(device):
    ends = torch.tensor([0, 2, 2, 5, 9], dtype=torch.int32, device=device)
    ratio = DropPath(0.5)(torch.ones(10, 3, device=device), ends)
    for start, end in ((0, 2), (2, 5), (5, 9)):
        assert len(ratio[start:end].unique()) == 1
