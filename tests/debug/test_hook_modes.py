"""Debugger hooks with micro-batches, cached weights, recomputation and calibration."""

from unittest.mock import Mock

import pytest
import torch
from fake_manager import session
from hook_cases import HighPrecision, Modifier, Recorder, build, train
from precisions import RECIPES, scope
from rulers import assert_equal
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.fp8.casts.quantizers import IdentityQuantizer
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def looked_at(recorder: Recorder) -> list[str]:
    return [c[2] for c in recorder.calls if c[0] == "inspect"]


class Caster(Modifier):
    """A feature that casts operands to FP8 by current scaling."""

    fp8_gemm_enabled = HighPrecision.fp8_gemm_enabled

    def modify_tensor(self, config, tensor_name, gemm, tensor, default_quantizer, out=None):
        self.calls.append((tensor_name, gemm, out is not None))
        quantizer = Float8CurrentScalingQuantizer(default_quantizer.dtype)
        if out is not None:
            quantizer.quantize(tensor, out=out)
            return None
        return quantizer(tensor)


class RecipesCaster:
    """A feature that casts operands with the quantizer of the recipe."""

    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True, iteration + 1

    def modify_tensor(self, config, tensor, default_quantizer):
        return default_quantizer(tensor)


@pytest.mark.parametrize("tokens", [(4, 40), (3, 7)], ids=["aligned", "odd"])
@pytest.mark.parametrize("recipe", ["current", "blocks"])
def test_casts_of_the_default_quantizer_are_those_of_the_recipe(recipe: str, tokens) -> None:
    expected = train(build("mlp", "cpu"), RECIPES[recipe], tokens)
    config = {"tensors": ["activation", "weight", "gradient"]}
    with session(("layer", RecipesCaster(), config)) as s:
        actual = train(build("mlp", "cpu"), RECIPES[recipe], tokens, after_step=s.step)
    assert_equal(actual, expected)


def test_one_scale_beside_scales_of_blocks_names_layer_and_gemm() -> None:
    class OneScale(RecipesCaster):
        def modify_tensor(self, config, tensor, default_quantizer):
            return Float8CurrentScalingQuantizer(default_quantizer.dtype)(tensor)

    config = {"tensors": ["activation"], "gemms": ["fprop"]}
    with (
        session(("layer", OneScale(), config)),
        te.fp8_autocast(fp8_recipe=RECIPES["blocks"]),
        pytest.raises(
            TypeError, match=r"\[fprop\] .* got FP8 and FP8 in 2D blocks \(layer layer\)"
        ),
    ):
        build("linear", "cpu")(batch(16, 32))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [Modifier, Caster])
def test_cached_weights_are_written_again(recipe: str, make) -> None:
    if make is Caster and recipe == "high precision":
        pytest.skip("there is no quantizer to ask for a format")
    modifier, module, x = make(), build("linear", "cpu"), batch(16, 32)
    config = {"tensors": ["weight", "activation"], "gemms": ["fprop"]}

    def call(first: bool) -> torch.Tensor:
        with scope(recipe):
            return module(x, is_first_microbatch=first)

    with session(("layer", modifier, config)) as s, torch.no_grad():
        first = call(True)
        module.weight.mul_(2)
        assert torch.equal(call(False), first)
        s.step()
        again = call(True)
        fresh = build("linear", "cpu")
        fresh.weight.mul_(2)
        module = fresh
        assert torch.equal(call(True), again)
    calls = [c for c in modifier.calls if c[0] == "weight"]
    assert calls == [
        ("weight", "fprop", False),
        ("weight", "fprop", True),
        ("weight", "fprop", False),
    ]


@pytest.mark.parametrize("make", [Modifier, Caster])
def test_weights_are_cached_anew_while_a_backward_waits(make) -> None:
    x, grads = batch(16, 32).requires_grad_(), []
    for first in (None, True):
        module = build("linear", "cpu")
        config = {"tensors": ["activation", "weight", "gradient"]}
        with session(("layer", make(), config)), scope("current"):
            twice = [module(x, is_first_microbatch=first) for _ in range(2)]
        sum(twice).sum().backward()
        grads.append([p.grad for p in module.parameters()])
    assert_equal(*grads)


def test_what_is_returned_beside_out_is_an_error() -> None:
    class Both(Modifier):
        def modify_tensor(self, config, tensor, out=None):
            return tensor * 2

    module = build("linear", "cpu")
    with (
        session(("layer", Both(), {"tensors": ["weight"], "gemms": ["fprop"]})),
        pytest.raises(RuntimeError, match=r"expected None where out is given.*layer layer, tensor"),
    ):
        for _ in range(2):
            module(batch(16, 32), is_first_microbatch=True)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_cached_without_features_are_not_used_with_them(recipe: str) -> None:
    module, x = build("linear", "cpu"), batch(16, 32)
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
        module(x, is_first_microbatch=True)
        with session(("layer", HighPrecision(), {})):
            y = module(x, is_first_microbatch=False)
        assert torch.equal(y, torch.nn.functional.linear(x, module.weight, module.bias))
        module(x, is_first_microbatch=False)


def test_micro_batches_share_decisions() -> None:
    recorder, module = Recorder(), build("linear", "cpu")
    with session(("layer", recorder, {})) as s:
        for first in (True, False, False):
            module(batch(16, 32), is_first_microbatch=first).sum().backward()
        s.step()
    assert [c[0] for c in recorder.calls].count("inspect?") == 6
    looks = looked_at(recorder)
    assert looks.count("weight") == 1 and looks.count("activation") == looks.count("gradient") == 3


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_is_seen_once_and_modified_again(recipe: str, reentrant: bool) -> None:
    def run(again: bool):
        module, recorder, modifier = build("mlp", "cpu"), Recorder(), Modifier()
        x = batch(16, 32).requires_grad_()

        def call(inp: torch.Tensor) -> torch.Tensor:
            with scope(recipe):
                return module(inp)

        with session(("layer", recorder, {}), ("fc2", modifier, {"tensors": ["activation"]})):
            y = checkpoint(call, x, use_reentrant=reentrant) if again else call(x)
            y.float().square().sum().backward()
        grads = [x.grad, *(p.grad for p in module.parameters())]
        looks = sorted(c for c in recorder.calls if c[0] in ("inspect", "after"))
        return [y.detach(), *grads], looks, modifier.calls

    torch.manual_seed(0)
    expected, looks, calls = run(False)
    torch.manual_seed(0)
    actual, looks_again, calls_again = run(True)
    assert_equal(actual, expected)
    names = [(kind, layer.rpartition(".")[2], *more) for kind, layer, *more in looks]
    again = [(kind, layer.rpartition(".")[2], *more) for kind, layer, *more in looks_again]
    assert again == names
    seen = {tuple(c[2:4]) for c in looks if c[0] == "after"}
    assert {("activation", "wgrad"), ("weight", "dgrad")} <= seen or recipe == "high precision"
    assert calls_again.count(("activation", "fprop", False)) == 2
    assert calls.count(("activation", "fprop", False)) == 1


@pytest.mark.parametrize("split", [None, ("query", "key")])
def test_checkpoints_of_products_in_high_precision(split) -> None:
    """The GEMMs of the backward cast operands to FP8 that the first forward has not cast."""

    def run(again: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = te.Linear(32, 32, device="cpu", parameters_split=split, name="layer")
        results = []
        with session(("layer", HighPrecision(), {"gemms": ["fprop"]})) as s:
            for _ in range(3):
                x = (1e-4 * torch.randn(16, 32)).requires_grad_()
                with te.fp8_autocast():
                    y = te.checkpoint(module, x) if again else module(x)
                y.square().sum().backward()
                results += [x.grad, *(p.grad.clone() for p in module.parameters())]
                s.step()
        return [*results, module.scaling["forward"].scale]

    assert_equal(run(True), run(False))


def test_calibration_is_noted_under_inspection() -> None:
    recipe, recorder = RECIPES["delayed"], Recorder()
    states = []
    for feature in ("elsewhere", "layer"):
        module = build("norm linear", "cpu")
        with (
            session((feature, recorder, {})),
            te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe),
        ):
            module(torch.linspace(-3, 3, 512).view(16, 32).bfloat16())
        states.append(module.scaling["forward"].scale)
    assert torch.equal(*states) and states[0].unique().numel() > 1
    assert looked_at(recorder) == ["activation", "weight", "output"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("feature", [Recorder, Modifier, HighPrecision])
def test_zero_tokens(recipe: str, feature) -> None:
    module = build("mlp", "cpu")
    with session(("layer", feature(), {})) as s:
        y, dx, *grads = train(module, RECIPES[recipe], tokens=(0,), steps=1, after_step=s.step)
    assert y.shape == dx.shape == (0, 32)
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weight(recipe: str) -> None:
    results, recorder = [], Recorder()
    for pattern in ("elsewhere", "layer"):
        module = build("linear", "cpu")
        module.weight.requires_grad_(False)
        x = torch.linspace(-2, 2, 16 * 32).view(16, 32).bfloat16().requires_grad_()
        with session((pattern, recorder, {})):
            with scope(recipe):
                y = module(x)
            y.backward(torch.ones_like(y))
        results.append([y, x.grad, module.bias.grad])
        assert module.weight.grad is None
    assert_equal(*results)
    assert "wgrad" not in looked_at(recorder) and "dgrad" in looked_at(recorder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradient_is_seen_and_changed_before_it_is_accumulated(
    recipe: str, dtype: torch.dtype
) -> None:
    class Doubler(Recorder):
        def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
            return True

        def modify_tensor(self, config, tensor):
            return tensor * 2

    def run(feature, config) -> torch.Tensor:
        torch.manual_seed(3)
        module = te.Linear(
            32,
            48,
            fuse_wgrad_accumulation=True,
            device="cpu",
            params_dtype=torch.bfloat16,
            name="layer",
        )
        module.weight.main_grad = torch.ones(48, 32, dtype=dtype)
        x = torch.linspace(-2, 2, 16 * 32).view(16, 32).bfloat16()
        with session(("layer", feature, config)):
            with scope(recipe):
                y = module(x)
            y.backward(torch.ones_like(y))
        return module.weight.main_grad

    plain = run(Recorder(), {"tensors": []})
    assert torch.equal(run(Recorder(), {}), plain)
    changed = run(Doubler(), {"tensors": ["wgrad"]})
    bounds = {} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 0.1}
    torch.testing.assert_close(changed - 1, 2 * (plain - 1), **bounds)


def test_torch_autocast_casts_what_features_see_in_high_precision() -> None:
    recorder, module = Recorder(), build("linear", "cpu", torch.float32)
    x = torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        with session(("layer", recorder, {})):
            y = module(x)
    assert torch.equal(y, expected) and y.dtype is torch.bfloat16
    y.sum().backward()


def test_wrong_results_of_modify_tensor_name_layer_tensor_and_gemm() -> None:
    for result, error, text in (
        (lambda x: None, TypeError, "NoneType"),
        (lambda x: x[:2], ValueError, r"shape \(16, 32\), got \(2, 32\)"),
        (lambda x: x.float(), ValueError, "Dtype does not match: expected torch.bfloat16"),
        (lambda x: x.to("meta"), ValueError, "expected a tensor on cpu, got one on meta"),
    ):

        class Wrong(Modifier):
            def modify_tensor(self, config, tensor, result=result):
                return result(tensor)

        with (
            session(("layer", Wrong(), {"tensors": ["activation"]})),
            pytest.raises(error, match=rf"{text}.*layer layer, tensor activation, gemm wgrad"),
        ):
            build("linear", "cpu")(batch(16, 32).requires_grad_())


def test_names_follow_the_module() -> None:
    module = build("mlp", "cpu")
    module.name = "model.mlp"
    te.gemm_report(reset=True)
    with session(("elsewhere", Recorder(), {})) as s:
        module(batch(16, 32))
        assert all(p.startswith(("model.mlp.fc1: ", "model.mlp.fc2: ")) for p in s.plans)
        module.name = "renamed"
        module(batch(16, 32))
    assert s.plans[-1].startswith("renamed.fc2: ")
    assert {layer for layer, _, _ in te.gemm_report().counts} == {
        "model.mlp.fc1",
        "model.mlp.fc2",
        "renamed.fc1",
        "renamed.fc2",
    }


def test_unnamed_layers_are_numbered() -> None:
    first, second = te.Linear(16, 16, device="cpu"), te.LayerNormMLP(16, 16, device="cpu")
    kind, number = first.name.split("_")
    assert kind == "Layer" and second.name == f"Layer_{int(number) + 1}"
    layer = te.TransformerLayer(32, 32, 2, device="cpu")
    assert layer.self_attention.layernorm_qkv.name == f"{layer.name}.self_attention.layernorm_qkv"
    assert layer.layernorm_mlp.chain.gemm_names == tuple(
        f"{layer.name}.layernorm_mlp.{part}" for part in ("fc1", "fc2")
    )


def test_plans_are_logged_again_when_they_change() -> None:
    class Later(HighPrecision):
        def fp8_gemm_enabled(self, config, gemm, iteration):
            return (True, 2) if iteration < 2 else (False, None)

    module = build("linear", "cpu")
    with session(("layer", Later(), {"gemms": ["dgrad"]})) as s:
        train(module, RECIPES["current"], steps=4, after_step=s.step)
    assert s.plans[6:] == [
        "layer: Tensor: weight, gemm dgrad - High precision",
        "layer: Tensor: gradient, gemm dgrad - High precision",
    ]


def test_statistics_are_attached_and_not_called_for() -> None:
    class Statistics(Recorder):
        built_in_statistics = True
        logged_call = "look_at_tensor_before_process"

    class Noting(IdentityQuantizer):
        statistics = Mock()  # every forward calls its `enter`

        def process_gemm_output(self, x):
            shapes.append(tuple(x.shape))
            return x

    class Provider:
        def attach(self, inner, calls, features, owner):
            assert owner is module
            due = calls.iteration == 1
            return (Noting() if due else None), (None if due else 1)

    shapes, feature, module = [], Statistics(), build("linear", "cpu")
    with session(("layer", feature, {"tensors": ["output"]})) as s:
        s.manager.statistics = Provider()
        train(module, None, steps=3, after_step=s.step)
    assert shapes == [(4, 8, 48), (4, 8, 48)]  # attached in iteration 1, and kept
    Noting.statistics.enter.assert_called_with(False)
    assert not looked_at(feature)
    assert s.manager.messages[-1:] == [
        "layer: Feature=Statistics, API=look_at_tensor_before_process: output"
    ]


def test_a_new_session_begins_anew() -> None:
    module, recorder = build("linear", "cpu"), Recorder()
    with session(("elsewhere", recorder, {})) as s:
        train(module, None, steps=3, after_step=s.step)
    with session(("layer", recorder, {})):
        train(module, None, steps=1)
    assert len(looked_at(recorder)) == 6
    module(batch(16, 32))
    assert len(looked_at(recorder)) == 6
