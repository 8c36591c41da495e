"""Cross entropy of classes that are split over two ranks equals that of all classes."""

import torch
from cross_entropy_ranks import problem, projection
from torch.nn.functional import cross_entropy, linear

IN_FP8 = 3  # index of the projection in FP8


def test_ranks_find_what_one_would(outcomes) -> None:
    logits, target = problem()
    for i, smoothing in enumerate((0.0, 0.1)):
        x = logits.double().requires_grad_()
        settings = {"label_smoothing": smoothing, "reduction": "none"}
        losses = cross_entropy(x.flatten(0, 1), target.flatten(), **settings).view(4, 5)
        (losses * torch.arange(20.0).view(4, 5)).sum().backward()
        for rank, outcome in enumerate(outcomes):
            found, gradient = outcome["losses_and_gradients"][i]
            torch.testing.assert_close(found, losses.float())
            torch.testing.assert_close(gradient, x.grad.chunk(2, dim=-1)[rank].float())


def test_compiled_code_finds_the_same(outcomes) -> None:
    for outcome in outcomes:
        eager = outcome["losses_and_gradients"]
        compiled = outcome["compiled_losses_and_gradients"]
        for ours, theirs in zip(eager, compiled, strict=True):
            assert torch.equal(ours[0], theirs[0])  # losses
            assert torch.equal(ours[1], theirs[1])  # gradients


def test_projections_to_shared_classes(outcomes) -> None:
    """Each rank has the full loss, the full gradient of hidden, and the gradient of its weight."""
    for i, reduction in enumerate(("mean", "none", "mean", "mean")):  # the third is compiled
        target = problem()[1]
        hidden, weight = (x.double().requires_grad_() for x in projection())
        logits = linear(hidden, weight).flatten(0, 1)
        settings = {"label_smoothing": 0.1, "reduction": reduction}
        losses = cross_entropy(logits, target.flatten(), **settings)
        losses = losses.view(4, 5) if reduction == "none" else losses
        (losses * torch.arange(1.0, losses.numel() + 1).view_as(losses)).sum().backward()
        for rank, outcome in enumerate(outcomes):
            found = outcome["linear_losses_and_gradients"][i]
            expected = (losses.detach(), hidden.grad, weight.grad.chunk(2)[rank])
            for ours, theirs in zip(found, expected, strict=True):
                bound = 0.1 if i == IN_FP8 else 1e-5
                assert (ours.double() - theirs).norm() <= bound * theirs.norm()
