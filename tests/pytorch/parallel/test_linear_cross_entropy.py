"""`linear_cross_entropy` on one rank: against the definition in float64, its memory, its errors."""

import weakref
from itertools import product

import pytest
import torch
from projection_cases import projection
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cross_entropy.linear import linear_cross_entropy
from transformer_engine.pytorch.cross_entropy.logits_in_chunks import default_chunks

TOKENS, FEATURES, CLASSES = 21, 16, 50


def problem(device, dtype=torch.float32, shape=(3, 7)):
    return projection(device, dtype, shape, CLASSES, FEATURES)


def by_definition(hidden, weight, bias, target, upstream=None, **settings):
    """Loss and gradients, computed in float64 from the same values."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logits = linear(*leaves).flatten(0, -2)
    logits = logits + (logits.to(hidden.dtype).double() - logits).detach()  # rounded, as ours are
    loss = cross_entropy(logits, target.flatten().long(), **settings)
    loss = loss.view(target.shape) if loss.ndim else loss
    upstream = torch.ones_like(loss) if upstream is None else upstream.double()
    return loss, torch.autograd.grad(loss, leaves, upstream)


def assert_close(found, expected, dtype):
    bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02}
    if dtype is not torch.float32:  # each gradient is a sum whose terms are rounded
        bounds["atol"] = 0.01 * expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_definition(dtype, smoothing, reduction, chunk, device):
    hidden, weight, bias, target = problem(device, dtype)
    settings = {"label_smoothing": smoothing, "reduction": reduction}
    loss = linear_cross_entropy(hidden, weight, target, bias, **settings, chunk_tokens=chunk)
    upstream = torch.rand_like(loss) + 0.5
    found = torch.autograd.grad(loss, (hidden, weight, bias), upstream)
    expected = by_definition(hidden, weight, bias, target, upstream, **settings)
    assert loss.dtype is torch.float32 and loss.shape == expected[0].shape
    assert_close(loss, expected[0], dtype)
    for ours, theirs in zip(found, expected[1], strict=True):
        assert ours.dtype is dtype
        assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_are_wanted(wanted, reduction):
    hidden, weight, bias, target = problem("cpu")
    leaves = (hidden, weight, bias)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    linear_cross_entropy(hidden, weight, target, bias, reduction=reduction).sum().backward()
    expected = by_definition(*leaves, target, reduction=reduction)[1]
    for i, leaf in enumerate(leaves):
        if i in wanted:
            assert_close(leaf.grad, expected[i], torch.float32)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_tokens_have_neither_loss_nor_gradient(reduction, device):
    hidden, weight, _, target = problem(device)
    target.fill_(7)
    target[1] = 3
    settings = {"reduction": reduction, "ignore_index": 7}
    loss = linear_cross_entropy(hidden, weight, target, **settings)
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert gradient[1].any() and not gradient[0].any() and not gradient[2].any()
    target.fill_(7)
    loss = linear_cross_entropy(hidden, weight, target, **settings)
    gradients = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert not loss.any() and not any(gradient.any() for gradient in gradients)


def test_no_tokens(device):
    hidden, weight, bias, target = problem(device, shape=(0, 4))
    assert linear_cross_entropy(hidden, weight, target, reduction="none").shape == (0, 4)
    loss = linear_cross_entropy(hidden, weight, target, bias)
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad.shape == hidden.shape
    assert not weight.grad.any() and not bias.grad.any()


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


class _Alive(TorchDispatchMode):
    """Records how many tensors of a shape, except fp32 ones, were allocated at once."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found, self.most = shape, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        allocates = function in (
            torch.ops.aten.new_empty.default,
            torch.ops.aten.empty_like.default,
        )
        if allocates and out.shape == self.shape and out.dtype is not torch.float32:
            self.found.append(weakref.ref(out))
            self.most = max(self.most, sum(one() is not None for one in self.found))
        return out


@pytest.mark.parametrize("fp8", [False, True])
def test_one_chunk_has_logits_at_a_time(fp8):
    hidden, weight, _, target = projection("cpu", torch.bfloat16, (96,), 48, FEATURES)
    with _Alive((32, 48)) as alive:
        linear_cross_entropy(hidden, weight, target, chunk_tokens=32, fp8=fp8).backward()
    assert alive.most == 1 + fp8  # in FP8, also the codes of their gradients


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_all_tokens_are_never_in_memory(reduction):
    hidden, weight, _, target = problem("cpu", shape=(1024,))
    with _Largest() as largest:
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_tokens=128)
        loss.sum().backward()
    assert largest.elements == max(hidden.numel(), 128 * CLASSES) < 1024 * CLASSES


def test_without_gradients_the_loss_is_all(device):
    hidden, weight, bias, target = problem(device)
    expected = linear_cross_entropy(hidden, weight, target, bias)
    with torch.no_grad(), _Largest() as largest:
        loss = linear_cross_entropy(hidden, weight, target, bias, chunk_tokens=1)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    assert largest.elements <= weight.numel()


@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad(announces, reduction, device):
    hidden, weight, _, target = problem(device, torch.bfloat16)
    settings = {"reduction": reduction}
    plain = linear_cross_entropy(hidden, weight, target, **settings).sum()
    expected = torch.autograd.grad(plain, (hidden, weight))
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    if announces:
        weight.grad_added_to_main_grad = False
    loss = linear_cross_entropy(hidden, weight, target, **settings, fuse_wgrad_accumulation=True)
    loss.sum().backward()
    assert torch.equal(hidden.grad, expected[0])
    added = weight.main_grad - 1
    torch.testing.assert_close(added, expected[1].float(), rtol=0.01, atol=1e-5)
    assert (weight.grad is not None) is announces
    assert not announces or weight.grad_added_to_main_grad


def test_autocast(device):
    """As in `torch.nn.functional.linear`: fp32 leaves, bf16 products, and fp32 gradients."""
    hidden, weight, bias, target = problem(device)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias)
    expected = linear_cross_entropy(*low[:2], target, low[2])
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for leaf, other in zip((hidden, weight, bias), low, strict=True):
        assert leaf.grad.dtype is torch.float32
        assert torch.equal(leaf.grad, other.grad.float())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction):
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found = []
    for call in (linear_cross_entropy, compiled):
        hidden, weight, bias, target = problem("cpu", torch.bfloat16)
        loss = call(hidden, weight, target, bias, 0.1, reduction, chunk_tokens=8)
        (2 * loss).sum().backward()
        found.append([loss, hidden.grad, weight.grad, bias.grad])
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours)


def test_compiled_with_main_grad():
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found = []
    for call in (linear_cross_entropy, compiled):
        hidden, weight, _, target = problem("cpu", torch.bfloat16)
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        call(hidden, weight, target, chunk_tokens=8, fuse_wgrad_accumulation=True).backward()
        assert weight.grad is None
        found.append(weight.main_grad)
    assert torch.equal(*found) and not torch.equal(found[0], torch.ones_like(found[0]))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad_of_several_calls_before_a_backward(reduction, compiles):
    """Pipelines do this, and some programs clear `main_grad` after the forward."""
    torch._dynamo.reset()
    call = torch.compile(linear_cross_entropy, backend="aot_eager") if compiles else None
    call = call or linear_cross_entropy
    hidden, weight, _, target = problem("cpu")
    weight.main_grad = torch.ones_like(weight)
    settings = {"reduction": reduction, "fuse_wgrad_accumulation": True}
    losses = [call(hidden, weight, target, **settings).sum() for _ in range(2)]
    weight.main_grad.zero_()
    for loss in losses:
        loss.backward()
    plain = linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
    (expected,) = torch.autograd.grad(plain, weight)
    torch.testing.assert_close(weight.main_grad, 2 * expected)


def test_a_graph_that_is_retained():
    hidden, weight, _, target = problem("cpu")
    loss = linear_cross_entropy(hidden, weight, target)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradients_of_gradients_are_refused():
    hidden, weight, _, target = problem("cpu")
    loss = linear_cross_entropy(hidden, weight, target)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        gradient.sum().backward()


def test_chunks():
    assert default_chunks(8192, 50304, torch.bfloat16, False) == (4096, 4096)
    assert default_chunks(8192, 50304, torch.bfloat16, True) == (1024, 4096)
    assert default_chunks(2048, 50304, torch.bfloat16, True) == (2048, 2048)
    assert default_chunks(0, 50304, torch.bfloat16, True) == (128, 128)


@pytest.mark.parametrize("classes", [1, 1000, 32000, 1_000_000])
@pytest.mark.parametrize("tokens", [1, 127, 128, 4096, 100_000])
def test_memory_of_chunks(tokens, classes):
    for dtype, fp8 in product((torch.float32, torch.bfloat16), (False, True)):
        chunk, group = default_chunks(tokens, classes, dtype, fp8)
        assert chunk % 128 == 0 and group % chunk == 0
        rounding = 128 * (group // chunk)  # tokens that fill whole tiles
        needed = (chunk - 128) * dtype.itemsize + 2 * fp8 * (group - rounding)
        assert needed * classes <= 2**29


@pytest.mark.gpu
def test_targets_that_are_no_classes_on_a_gpu():
    hidden, weight, _, target = problem("cuda")
    target[0, 1] = CLASSES
    losses = linear_cross_entropy(hidden, weight, target, reduction="none")
    assert losses[0, 1].isnan() and losses.isnan().sum() == 1


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "targets below 50 or -100, got 50", {"target": torch.full((3, 7), 50)}),
        (ValueError, r"target \[\.\.\.\], got .* \(7,\)", {"target": torch.ones(7).long()}),
        (TypeError, "target of int64 or int32", {"target": torch.ones(3, 7)}),
        (
            TypeError,
            "of one dtype, .* torch.float32, torch.float64",
            {"weight": torch.ones(5, 16).double()},
        ),
        (ValueError, r"got \(3, 7, 16\), \(50, 8\)", {"weight": torch.ones(50, 8)}),
        (ValueError, r"bias \[50\] .* got \(3,\)", {"bias": torch.ones(3)}),
        (ValueError, "0 <= label_smoothing <= 1, got 2", {"label_smoothing": 2}),
        (TypeError, "label_smoothing to be a number, got '0.1'", {"label_smoothing": "0.1"}),
        (TypeError, "ignore_index to be an int, got None", {"ignore_index": None}),
        (ValueError, "reduction in .*, got 'max'", {"reduction": "max"}),
        (ValueError, "chunk_tokens >= 1, got 0", {"chunk_tokens": 0}),
        (TypeError, "chunk_tokens to be an int, got 1.5", {"chunk_tokens": 1.5}),
        (TypeError, "target to be a torch.Tensor, got list", {"target": [1, 2]}),
        (TypeError, "bias to be a torch.Tensor, got int", {"bias": 1}),
        (TypeError, "dist_process_group to be a process group", {"dist_process_group": "tp"}),
    ],
)
def test_bad_arguments(error, message, changes):
    hidden, weight, _, target = problem("cpu")
    with pytest.raises(error, match=rf"^\[linear_cross_entropy\] expected .*{message}"):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, **changes})


def test_weights_that_do_not_fit():
    hidden, weight, _, target = problem("cpu")
    with te.fp8_model_init(enabled=True):
        quantized = te.Linear(32, 32, bias=False, device="cpu").weight
    with pytest.raises(TypeError, match="weight in high precision, got Float8Tensor"):
        linear_cross_entropy(hidden, quantized, target)
    with pytest.raises(ValueError, match=r"expected weight\.main_grad"):
        linear_cross_entropy(hidden, weight, target, fuse_wgrad_accumulation=True)


def test_public_name():
    assert te.linear_cross_entropy is linear_cross_entropy
