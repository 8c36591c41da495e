"""`linear_cross_entropy(fp8=True)`, against products of the rounded values in float64."""

import pytest
import torch
from projection_cases import projection
from torch.nn.functional import cross_entropy

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cross_entropy import linear_cross_entropy

FEATURES, CLASSES = 32, 80
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def problem(device, dtype=torch.bfloat16, shape=(3, 16)):
    return projection(device, dtype, shape, CLASSES, FEATURES)


def rounded(x, dtype, scale):
    """The values of the codes of `x`, in float64."""
    return (x.float() * scale).to(dtype).double() / scale.double()


def in_e4m3(x):
    """`x` rounded to E4M3 with the scale of current scaling."""
    x = x.detach()
    return rounded(x, E4M3, 448.0 / x.float().abs().max())


def by_definition(hidden, weight, bias, target, factors, **settings):
    """Losses of tokens, and gradients of their sum, weighted by `factors`."""
    x, w = in_e4m3(hidden).flatten(0, -2), in_e4m3(weight)
    logits = (x @ w.t() + bias.detach().double()).to(hidden.dtype).double().requires_grad_()
    target = target.flatten()
    losses = cross_entropy(logits, target, reduction="none", **settings)
    (by_logits,) = torch.autograd.grad(losses, logits, factors)
    scale = torch.exp2(torch.log2(57344.0 / factors.abs().max()).floor()).float()
    codes = rounded(by_logits, E5M2, scale)
    by_bias = by_logits.to(hidden.dtype).double().sum(0)
    return losses.detach(), (codes @ w, codes.t() @ x, by_bias)


def assert_near(found, expected, bound):
    """Compare norms, because a value in the middle of two codes may round to either."""
    error = (found.double() - expected.view_as(found)).norm()
    assert error <= bound * expected.norm(), f"{error / expected.norm():.4f} > {bound}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 10])
def test_losses_of_tokens(dtype, chunk, device):
    hidden, weight, bias, target = problem(device, dtype)
    settings = {"label_smoothing": 0.1}
    losses = linear_cross_entropy(
        *(hidden, weight, target, bias),
        **settings,
        reduction="none",
        chunk_tokens=chunk,
        fp8=True,
    )
    factors = torch.rand(target.shape, device=device) + 0.5
    found = torch.autograd.grad(losses, (hidden, weight, bias), factors)
    each = factors.flatten().double()
    expected, gradients = by_definition(hidden, weight, bias, target, each, **settings)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.flatten(), expected.float(), rtol=1e-3, atol=1e-2)
    for ours, theirs in zip(found, gradients, strict=True):
        assert ours.dtype is dtype
        assert_near(ours, theirs, 0.01)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_all(reduction, device):
    hidden, weight, bias, target = problem(device)
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, fp8=True)
    found = torch.autograd.grad(3.0 * loss, (hidden, weight, bias))
    ones = torch.ones(target.numel(), dtype=torch.float64, device=device)
    losses, gradients = by_definition(hidden, weight, bias, target, ones)
    divisor = (target != -100).sum() if reduction == "mean" else 1
    torch.testing.assert_close(loss, (losses.sum() / divisor).float(), rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(found, gradients, strict=True):
        assert_near(ours, theirs * 3.0 / divisor, 0.01)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_number_of_tokens(reduction, device):
    """The tokens are padded with zeros, which are ignored."""
    hidden, weight, _, target = problem(device)
    found = []
    for tokens in (21, 32):
        part = hidden.detach()[:2].flatten(0, 1)[:tokens].requires_grad_()
        labels = target[:2].flatten()[:tokens].clone()
        labels[21:] = -100
        part.data[21:] = 0.0
        loss = linear_cross_entropy(part, weight, labels, reduction=reduction, fp8=True)
        found.append([loss, *torch.autograd.grad(loss.sum(), (part, weight))])
    assert found[0][1].shape == (21, FEATURES)
    for short, long in zip(*found, strict=True):
        assert torch.equal(short, long[: len(short)] if long.ndim else long)


def test_no_tokens(device):
    hidden, weight, bias, target = problem(device, shape=(0, 4))
    loss = linear_cross_entropy(hidden, weight, target, bias, fp8=True)
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad.shape == hidden.shape
    assert not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_are_wanted(wanted, reduction):
    hidden, weight, bias, target = problem("cpu")
    call = {"reduction": reduction, "fp8": True}
    loss = linear_cross_entropy(hidden, weight, target, bias, **call).sum()
    expected = torch.autograd.grad(loss, (hidden, weight, bias))
    leaves = (hidden, weight, bias)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    linear_cross_entropy(hidden, weight, target, bias, **call).sum().backward()
    for i, leaf in enumerate(leaves):
        assert leaf.grad is None if i not in wanted else torch.equal(leaf.grad, expected[i])


def test_products_are_in_fp8():
    hidden, weight, _, target = problem("cpu")
    te.gemm_report(reset=True)
    with te.fp8_autocast(enabled=False):
        linear_cross_entropy(hidden, weight, target, fp8=True).backward()
    report = te.gemm_report(reset=True)
    assert report.total("fp8") == report.total() == 3


def test_weight_in_main_grad(device):
    hidden, weight, _, target = problem(device)
    loss = linear_cross_entropy(hidden, weight, target, fp8=True)
    (expected,) = torch.autograd.grad(loss, weight)
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, target, fp8=True, fuse_wgrad_accumulation=True)
    loss.backward()
    added = weight.main_grad - 1
    torch.testing.assert_close(added, expected.float(), rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found = []
    for call in (linear_cross_entropy, compiled):
        hidden, weight, bias, target = problem("cpu", shape=(21,))
        settings = {"reduction": reduction, "chunk_tokens": 16, "fp8": True}
        loss = call(hidden, weight, target, bias, 0.1, **settings)
        (2 * loss).sum().backward()
        found.append([loss, hidden.grad, weight.grad, bias.grad])
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours)


@pytest.mark.gpu
def test_captured():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        hidden, weight, _, target = problem("cuda")

        def step():
            loss = linear_cross_entropy(hidden, weight, target, fp8=True)
            return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

        expected = step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for x in found:
        x.zero_()
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"multiples of 16 with fp8=True, got a weight \(72, 32\)", {"classes": 72}),
        (ValueError, r"multiples of 16 with fp8=True, got a weight \(80, 24\)", {"features": 24}),
        (TypeError, "fp8 to be a bool, got str", {"fp8": "E4M3"}),
    ],
)
def test_bad_arguments(error, message, changes):
    features = changes.get("features", FEATURES)
    weight = torch.ones(changes.get("classes", CLASSES), features)
    with pytest.raises(error, match=rf"^\[linear_cross_entropy\] expected .*{message}"):
        linear_cross_entropy(
            *(torch.ones(4, features), weight, torch.ones(4).long()),
            fp8=changes.get("fp8", True),
        )
