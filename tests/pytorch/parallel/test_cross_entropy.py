"""`parallel_cross_entropy` on one rank, against the definition in float64, and its errors."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy


def problem(device, dtype=torch.float32, shape=(3, 7), classes=50):
    torch.manual_seed(0)
    logits = (5 * torch.randn(*shape, classes)).to(device, dtype).requires_grad_()
    target = torch.randint(classes, shape, device=device)
    target.view(-1)[::5] = -100
    return logits, target


def by_definition(logits, target, smoothing, reduction):
    """Losses and gradient, computed in float64 from the same values."""
    x = logits.detach().double().requires_grad_()
    losses = cross_entropy(
        x.flatten(0, -2), target.flatten().long(), label_smoothing=smoothing, reduction=reduction
    )
    losses = losses.view(target.shape) if reduction == "none" else losses
    return losses, torch.autograd.grad(losses.square().sum(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduce", [False, True])
def test_definition(dtype, smoothing, reduce, device):
    logits, target = problem(device, dtype)
    losses = parallel_cross_entropy(logits, target, smoothing, reduce)
    (gradient,) = torch.autograd.grad(losses.square().sum(), logits)
    expected = by_definition(logits, target, smoothing, "mean" if reduce else "none")
    assert losses.dtype is torch.float32 and gradient.dtype is dtype
    torch.testing.assert_close(losses, expected[0].float())
    # In low precision, the saved gradient and its product with the upstream one are both rounded.
    bounds = {} if dtype is torch.float32 else {"rtol": 0.01, "atol": 1e-4}
    torch.testing.assert_close(gradient.float(), expected[1].float(), **bounds)


def test_targets_of_any_stride_and_integer(device):
    logits, target = problem(device)
    expected = parallel_cross_entropy(logits, target)
    strided = target.t().contiguous().t()
    assert torch.equal(parallel_cross_entropy(logits, strided.int()), expected)


def test_ignored_tokens_have_neither_loss_nor_gradient(device):
    logits, target = problem(device)
    target.fill_(7)
    losses = parallel_cross_entropy(logits, target, 0.1, True, None, 7)
    losses.backward()
    assert losses.item() == 0.0 and not logits.grad.any()


def test_logits_of_minus_infinity(device):
    """Padded vocabularies have such logits."""
    logits, target = problem(device)
    with torch.no_grad():
        logits[..., -1] = -torch.inf
    target.clamp_(max=logits.shape[-1] - 2)
    losses = parallel_cross_entropy(logits, target)
    torch.testing.assert_close(losses, by_definition(logits, target, 0.0, "none")[0].float())
    losses.sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[..., -1].any()


def test_no_tokens(device):
    logits, target = problem(device, shape=(0, 4))
    assert parallel_cross_entropy(logits, target).shape == (0, 4)
    assert parallel_cross_entropy(logits, target, reduce_loss=True).item() == 0.0


def test_only_the_gradient_is_kept():
    """It has the dtype and the size of the logits."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    logits, target = problem("cpu", torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parallel_cross_entropy(logits, target)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.bfloat16, logits.numel())]


@pytest.mark.gpu
def test_targets_that_are_no_classes_on_a_gpu():
    logits, target = problem("cuda")
    target[0, 1] = 50
    losses = parallel_cross_entropy(logits, target)
    assert losses[0, 1].isnan() and losses.isnan().sum() == 1


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"targets below 50 or -100, got 50", {"target": torch.full((3, 7), 50)}),
        (ValueError, r"targets below 50 or -1, got -100", {"ignore_idx": -1}),
        (ValueError, r"target \[\.\.\.\], got \(3, 7, 50\) and \(7,\)", {"target": torch.ones(7)}),
        (TypeError, "target of int64 or int32, got torch.float32", {"target": torch.ones(3, 7)}),
        (TypeError, "target to be a torch.Tensor, got list", {"target": [1]}),
        (TypeError, "inp of float32, .* got torch.float64", {"inp": torch.ones(3, 7, 50).double()}),
        (ValueError, "0 <= label_smoothing <= 1, got 2", {"label_smoothing": 2}),
        (TypeError, "label_smoothing to be a number, got None", {"label_smoothing": None}),
        (TypeError, "ignore_idx to be an int, got None", {"ignore_idx": None}),
        (TypeError, "ignore_idx to be an int, got 1.5", {"ignore_idx": 1.5}),
        (TypeError, "dist_process_group to be a process group", {"dist_process_group": "tp"}),
    ],
)
def test_bad_arguments(error, message, changes):
    logits, target = problem("cpu")
    if getattr(changes.get("target"), "ndim", 0) == 1:
        changes = {"target": changes["target"].long()}
    with pytest.raises(error, match=rf"^\[parallel_cross_entropy\] expected .*{message}"):
        parallel_cross_entropy(**{"inp": logits, "target": target, **changes})


def test_public_name():
    assert te.parallel_cross_entropy is parallel_cross_entropy
