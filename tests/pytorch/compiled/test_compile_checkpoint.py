"""`te.checkpoint` in compiled code: one graph, the same bits, and the backward does recompute."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_helpers import HIDDEN, build, states, uncheckpointed
from compiled_graphs import compiled, saved_and_run
from precisions import RECIPES, scope
from rulers import assert_equal
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.module.residual import Residual

Call = Callable[..., Any]
ALL_RECIPES = {**RECIPES, "attention": DelayedScaling(amax_history_len=4, fp8_dpa=True)}
HIGH = "high precision"


def own_switch(m: Any, x: torch.Tensor, wrap: Call | None) -> torch.Tensor:
    m["mlp"].checkpoint = wrap is not None
    return m["mlp"](m["linear"](x))


def core_attention(m: Any, x: torch.Tensor, wrap: Call | None) -> torch.Tensor:
    return m["layer"](x, checkpoint_core_attention=wrap is not None)


def one_after_another(m: Any, x: torch.Tensor, wrap: Call | None) -> torch.Tensor:
    """Two checkpoints; the MLP runs in both, and twice in the second."""
    wrap = wrap or uncheckpointed
    y = wrap(lambda x, *, scale: m["linear"](m["mlp"](x)) * scale["by"][0], x, scale={"by": [2.0]})
    return wrap(lambda x: m["mlp"](m["mlp"](x)), m["linear"](y))


def nested(m: Any, x: torch.Tensor, wrap: Call | None) -> torch.Tensor:
    wrap = wrap or uncheckpointed
    return wrap(lambda x: m["linear"](wrap(m["mlp"], m["linear"](x))), x)


def a_layer(m: Any, x: torch.Tensor, wrap: Call | None) -> torch.Tensor:
    y: torch.Tensor = (wrap or uncheckpointed)(
        m["layer"], x, checkpoint_core_attention=wrap is not None
    )
    return y


class Case(NamedTuple):
    """What is trained, with which recipe, and whether compiled code enters the autocast."""

    body: Call
    recipe: str
    inside: bool = False
    dynamic: bool = False
    reentrant: bool = True

    def __str__(self) -> str:
        words = [self.body.__name__, self.recipe, "inside" if self.inside else "outside"]
        return "-".join(words + ["dynamic"] * self.dynamic + ["reentrant"] * self.reentrant)

    def train(
        self, device: str, wrap: Call | None, compiler: Call = lambda function, **_: function
    ) -> list[torch.Tensor]:
        """Results, gradients and FP8 state of three steps."""
        reset_autocast()
        torch._dynamo.reset()
        modules = build(device)
        recipe = ALL_RECIPES[self.recipe]
        autocast = partial(te.fp8_autocast, recipe is not None, fp8_recipe=recipe)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self.inside:
                return self.body(modules, x, wrap)
            with autocast():
                return self.body(modules, x, wrap)

        call = compiler(forward, **({"dynamic": True} if self.dynamic else {}))
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            tokens = 8 + 8 * (step == 1) if self.dynamic else 8
            x = torch.randn(tokens, 2, HIDDEN, generator=generator).to(device) * (3 - step)
            x.requires_grad_()
            modules.zero_grad()
            if self.inside:
                y = call(x)
            else:
                with autocast():
                    y = call(x)
            y.square().mean().backward()
            found += [y.detach(), x.grad]
            found += [p.grad for p in modules.parameters() if p.grad is not None]
            found += states(modules)
        return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor], device: str) -> None:
    """Compares with eager mode, whose kernels add some sums in another order on a GPU."""
    if torch.device(device).type == "cpu":
        assert_equal(found, expected)
    else:
        near(found, expected)


def near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compares within 5%: results are rounded differently, which may change an FP8 code."""
    for got, wanted in zip(found, expected, strict=True):
        error = (got.double() - wanted.double()).norm()
        assert error <= 0.05 * wanted.double().norm() + 1e-6


CASES = (
    Case(own_switch, "delayed"),
    Case(own_switch, HIGH, inside=True, dynamic=True),
    Case(own_switch, "blocks", inside=True),
    Case(one_after_another, "delayed", inside=True, reentrant=False),
    Case(one_after_another, "current", dynamic=True),
    Case(nested, "delayed", reentrant=False, dynamic=True),
    Case(nested, "current", inside=True),
    Case(a_layer, "attention"),
    Case(a_layer, HIGH, reentrant=False),
    Case(core_attention, "attention", inside=True),
    Case(core_attention, "current", dynamic=True),
)


@pytest.mark.sampled_on_cpu
@pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_eager(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with eager mode with a checkpoint, then without one."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    wrap = partial(te.checkpoint, use_reentrant=case.reentrant)
    found = case.train(device, wrap, compiled())
    same(found, case.train(device, wrap), device)
    if torch.device(device).type == "cuda":
        assert_equal(found, case.train(device, None, compiled()))
    else:
        assert_equal(found, case.train(device, None))


def test_inductor(device: str) -> None:
    case = Case(own_switch, "delayed")
    found = case.train(device, te.checkpoint, compiled("inductor"))
    near(found, case.train(device, None))


@pytest.mark.parametrize("recipe", [HIGH, "delayed", "current"])
def test_activations_are_not_kept(recipe: str) -> None:
    layer = build("cpu")["mlp"]
    x = torch.randn(256, HIDDEN, requires_grad=True)
    with scope(recipe):
        layer(x).sum().backward()  # makes the state
    saved, run = saved_and_run(layer, x, recipe)
    assert not run["backward chain_forward"] and run["backward chain_backward"] == 1
    layer.checkpoint = True
    less, again = saved_and_run(layer, x, recipe)
    # In high precision the norm runs once more, for wgrad.
    assert again["backward norm_forward"] == 1 + (recipe == HIGH)
    # The activation's backward makes the input of wgrad. In FP8 that input needs a scale, so the
    # activation runs again.
    assert again["backward activation_forward"] == (recipe != HIGH)
    assert again["forward norm_forward"] == run["forward chain_forward"] == 1
    assert x.nbytes <= less < x.nbytes + 512 < saved / 2  # scales are small


def test_core_attention_is_not_kept() -> None:
    # With this softmax the scores are stored.
    core = te.DotProductAttention(2, 16, softmax_type="off-by-one")
    x = torch.randn(64, 2, 2, 16, requires_grad=True)
    (saved, run), (less, again) = (
        saved_and_run(lambda x, how=how: core(x, x, x, checkpoint_core_attention=how), x, HIGH)
        for how in (False, True)
    )
    scores = 4 * 2 * 2 * 64 * 64  # fp32 of two heads and two sequences
    assert saved - less >= scores
    assert (run["backward softmax_forward"], again["backward softmax_forward"]) == (0, 1)


@pytest.mark.sampled_on_cpu("dropout-inductor", "drop1-aot_eager")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("drop", [nn.functional.dropout, Residual(with_residual=False)])
def test_gradients_belong_to_the_mask(drop: Call, backend: str, device: str) -> None:
    """Random numbers drawn between forward and backward do not change the mask."""
    torch._dynamo.reset()
    call = torch.compile(
        lambda x: te.checkpoint(lambda x: drop(x, 0.5).exp() * x, x),
        backend=backend,
        fullgraph=True,
    )
    masks = []
    for _ in range(2):
        x = (torch.rand(64, HIDDEN, device=device) + 0.5).requires_grad_()
        y = call(x)
        torch.rand(7, device=device)
        y.sum().backward()
        x, gradient = x.detach(), x.grad
        masks.append(y.detach() > 1.5 * x)  # kept values are doubled, dropped ones give x
        expected = torch.where(masks[-1], (2 * x).exp() * (1 + 2 * x), torch.ones_like(x))
        torch.testing.assert_close(gradient, expected)
    assert not torch.equal(*masks)


def test_dropout_of_a_layer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    found = []
    for wrap in (uncheckpointed, te.checkpoint):
        torch._dynamo.reset()
        layer = build(device, dropout=0.2)["layer"]
        call = compiled()(lambda x, layer=layer, wrap=wrap: wrap(layer, x))
        torch.manual_seed(1)
        x = torch.ones(16, 2, HIDDEN, device=device, requires_grad=True)
        y = call(x)
        torch.rand(7, device=device)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    if torch.device(device).type == "cpu":
        assert_equal(found[1], found[0])
        return
    # A graph that recomputes draws other random numbers than one that does not, so only check
    # that the results are finite.
    assert all(bool(t.isfinite().all()) for t in found[1])


def test_micro_batches(device: str) -> None:
    """Weights that the first micro-batch caches in a checkpoint are used by later ones."""
    found = []
    for wrap in (uncheckpointed, te.checkpoint):
        reset_autocast()
        torch._dynamo.reset()
        modules = build(device)
        layer = modules["mlp"]
        call = lambda x, first, layer=layer: layer(x, is_first_microbatch=first)  # noqa: E731
        if wrap is not uncheckpointed:
            call = compiled()(
                lambda x, first, layer=layer: te.checkpoint(layer, x, is_first_microbatch=first)
            )
        results = []
        for step, first in enumerate((True, False, False)):
            x = torch.full((16, HIDDEN), 1.0 + step, device=device).cumsum(1).requires_grad_()
            with scope("delayed"):
                y = call(x, first)
            y.square().mean().backward()
            results += [y.detach(), x.grad.clone()]
        grads = [p.grad for p in layer.parameters()]
        found.append([*results, *grads, *states(modules)])
    same(found[1], found[0], device)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_kept_in_fp8(recipe: str, device: str) -> None:
    found = []
    for again in (False, True):
        reset_autocast()
        torch._dynamo.reset()
        with te.quantized_model_init(recipe=RECIPES[recipe]):
            layer = build(device)["mlp"]
        layer.checkpoint = again
        call = compiled()(layer) if again else layer
        for step in range(2):
            x = torch.full((16, HIDDEN), 1.0 + step, device=device).cumsum(1).requires_grad_()
            with scope(recipe):
                y = call(x)
            y.square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    same(found[1], found[0], device)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_inference_runs_once(grad: Call, device: str) -> None:
    torch._dynamo.reset()
    layer = build(device)["mlp"].eval()
    call = compiled()(lambda x: te.checkpoint(layer, x))
    x = torch.ones(16, HIDDEN, device=device)
    with grad(), scope("current"):
        assert torch.equal(call(x), layer(x))


def test_calibration_counts_once() -> None:
    """Calibration runs in high precision and records amaxes; a recompute must not record them."""
    found = []
    for wrap in (uncheckpointed, te.checkpoint):
        reset_autocast()
        torch._dynamo.reset()
        modules = build("cpu")
        call = lambda x, m=modules, wrap=wrap: wrap(m["mlp"], x)  # noqa: E731
        call = call if wrap is uncheckpointed else compiled()(call)
        for size in (3.0, 2.0):
            x = torch.full((16, HIDDEN), size).cumsum(1).requires_grad_()
            with te.fp8_autocast(False, calibrating=True, fp8_recipe=RECIPES["delayed"]):
                y = call(x)
            y.sum().backward()
        found.append([x.grad, *states(modules)])
    assert_equal(found[1], found[0])
