"""`delay_wgrad_compute`: `backward_dw` gives the gradients that a backward would have given."""

import copy
from pathlib import Path

import pytest
import torch
from debug_session import debugging, logged, section
from fake_manager import session
from hook_cases import HighPrecision
from rulers import assert_bitwise
from sizes import as_large_inputs

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.cuda_graphs import callables

RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
SPLIT = {"a": 32, "b": 64}
MODULES = {
    "Linear": lambda **more: te.Linear(64, 96, **more),
    "Linear of parts": lambda **more: te.Linear(64, 96, parameters_split=SPLIT, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(64, 96, bias=False, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(64, 128, **more),
    "recomputed": lambda **more: te.LayerNormMLP(64, 128, checkpoint=True, **more),
    "GroupedLinear": lambda **more: te.GroupedLinear(3, 64, 96, **more),
}


def pair(kind, **more):
    """A module, and one that delays gradients, with equal parameters."""
    options = {"device": "cpu", "params_dtype": torch.bfloat16, **more}
    torch.manual_seed(0)
    plain = MODULES[kind](**options)
    late = MODULES[kind](**options, delay_wgrad_compute=True)
    late.load_state_dict(plain.state_dict())
    return plain, late


def step(module, seed, recipe=None, **more):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x.requires_grad_()
    splits = ([40, 0, 24],) if isinstance(module, te.GroupedLinear) else ()
    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = module(x, *splits, **more)
    y.backward(torch.ones_like(y) * seed)
    return [y.detach(), x.grad]


def equal(first, second):
    for a, b in zip(first, second, strict=True):
        assert_bitwise(a, b)


def grads(module, name="grad"):
    return [getattr(p, name) for p in module.parameters() if getattr(p, name, None) is not None]


@pytest.mark.parametrize("way", ["recorded", "large", "stage by stage"])
@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_those_of_a_backward(kind, precision, way, monkeypatch):
    if way == "stage by stage":
        monkeypatch.setattr(Chain, "most_shapes", 0)
    plain, late = pair(kind)
    with as_large_inputs(way == "large"):
        for first in (1, 3, 5):  # two backwards each, whose gradients are added
            for seed in (first, first + 1):
                equal(step(plain, seed, RECIPES[precision]), step(late, seed, RECIPES[precision]))
            names = {n for n, p in late.named_parameters() if p.grad is not None and p.dim() > 1}
            assert first > 1 or not names, names
            late.backward_dw()
            late.backward_dw()
            equal(grads(late), grads(plain))
            assert len(grads(late)) == len(list(late.parameters()))


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
def test_weights_may_go_into_main_grad(kind):
    plain, late = pair(kind, fuse_wgrad_accumulation=True)
    for module in (plain, late):
        for p in module.parameters():
            if p.dim() == 2:
                p.main_grad, p.grad_added_to_main_grad = torch.ones_like(p).float(), False
    for seed in (1, 2):
        equal(step(plain, seed), step(late, seed))
    assert all((main == 1).all() for main in grads(late, "main_grad"))
    hooks = []
    late.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
    late.backward_dw()
    late.backward_dw()
    assert hooks == [1, 1]
    equal(grads(late, "main_grad"), grads(plain, "main_grad"))
    assert all(
        p.grad is None and p.grad_added_to_main_grad for p in late.parameters() if p.dim() == 2
    )


def test_micro_batches_read_the_weight_of_the_first():
    plain, late = pair("LayerNormMLP")
    for seed, first in ((1, True), (2, False)):
        more = {"is_first_microbatch": first}
        equal(
            step(plain, seed, RECIPES["current"], **more),
            step(late, seed, RECIPES["current"], **more),
        )
    late.backward_dw()
    late.backward_dw()
    equal(grads(late), grads(plain))


def test_weights_in_fp8_have_late_gradients_too():
    with te.fp8_model_init(recipe=RECIPES["current"]):
        plain, late = pair("Linear")
    equal(step(plain, 1, RECIPES["current"]), step(late, 1, RECIPES["current"]))
    late.backward_dw()
    equal(grads(late), grads(plain))


def test_what_is_not_trained_has_no_gradient():
    plain, late = pair("LayerNormMLP")
    for module in (plain, late):
        module.fc1_weight.requires_grad_(False)
        module.fc2_bias.requires_grad_(False)
    equal(step(plain, 1), step(late, 1))
    assert late.fc1_bias.grad is not None  # it is not delayed, because fc1_weight is frozen
    late.backward_dw()
    equal(grads(late), grads(plain))
    assert late.fc1_weight.grad is None and late.fc2_bias.grad is None


def test_parameters_say_that_hooks_shall_not_wait_for_the_backward():
    _, late = pair("LayerNormLinear")
    marked = {n for n, p in late.named_parameters() if getattr(p, "skip_backward_post_hook", False)}
    assert marked == {"weight"}
    assert late.need_backward_dw() and not te.Linear(16, 16, device="cpu").need_backward_dw()


def test_the_debugger_sees_weight_gradients_when_they_are_computed(tmp_path: Path):
    plain, late = pair("Linear")
    found = []
    for name, module in (("plain", plain), ("late", late)):
        module.name = "layer"
        config = section("LogTensorStats", tensors=["wgrad", "gradient"], stats=["l1_norm", "max"])
        with debugging(tmp_path / name, config):
            step(module, 1)
            module.backward_dw()
            debug_api.step()
        found.append(logged(tmp_path / name))
    assert found[0] == found[1] and (0, "layer", "wgrad") in found[0]
    equal(grads(late), grads(plain))


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_features_get_the_tensors_that_they_get_without_it(kind):
    class Looks(HighPrecision):
        def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
            return True

        def inspect_tensor(self, config, layer_name, tensor_name, tensor):
            seen.append((layer_name, tensor_name, tensor.clone()))

    plain, late = pair(kind, name="layer")
    found = []
    for module in (plain, late):
        seen = []
        with session(("layer", Looks(), {"gemms": ["wgrad"]})):
            result = step(module, 1, RECIPES["current"])
            module.backward_dw()
        seen.sort(key=lambda call: call[:2])
        found.append(([call[:2] for call in seen], [call[2] for call in seen] + result))
    assert found[0][0] == found[1][0]
    equal(found[0][1], found[1][1])
    equal(grads(late), grads(plain))


def test_compiled_code_leaves_its_graph_for_it():
    plain, late = pair("Linear")
    compiled = torch.compile(torch.nn.Sequential(late, torch.nn.ReLU()), backend="aot_eager")
    eager = torch.nn.Sequential(plain, torch.nn.ReLU())
    equal(step(eager, 1), step(compiled, 1))
    late.backward_dw()
    equal(grads(late), grads(plain))


def test_copies_have_nothing_to_compute():
    _, late = pair("Linear")
    step(late, 1)
    twin = copy.deepcopy(late)
    late.backward_dw()
    for module in (late, twin):
        with pytest.raises(RuntimeError, match=r"\[Linear\] expected a backward before each backw"):
            module.backward_dw()


def test_computed_weights_are_refused():
    _, late = pair("Linear")
    late.name = "fc"
    torch.nn.utils.parametrizations.weight_norm(late)
    step(late, 1)
    with pytest.raises(RuntimeError, match=r"expected weight to be the parameter .* \(layer fc\)"):
        late.backward_dw()


def test_graphs_refuse_it():
    _, late = pair("Linear", name="fc")
    with pytest.raises(ValueError, match=r"delay_wgrad_compute=False .* \(layer fc\)"):
        callables._check_capturable([torch.nn.Sequential(late)], None)
