"""`CustomRecipe`: a function chooses the quantizer of each tensor of each GEMM."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from custom_recipes import (
    E4M3,
    E5M2,
    MODULES,
    Blocks,
    Current,
    Delayed,
    as_blocks,
    as_current,
    choosing,
    run,
)
from debug_session import debugging, logged, section
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer

SAME = [(as_current, Float8CurrentScaling()), (as_blocks, Float8BlockScaling())]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("factory", "same"), SAME, ids=["current", "blocks"])
@pytest.mark.parametrize("name", MODULES)
def test_bits_are_those_of_the_recipe_with_these_quantizers(name, factory, same, device) -> None:
    module = MODULES[name](device)
    te.gemm_report(reset=True)
    wanted = run(module, same)
    counts = te.gemm_report(reset=True).counts
    roles: list[te.QuantizerRole] = []

    def counting(role: te.QuantizerRole) -> Any:
        roles.append(role)
        return factory(role)

    recipe = CustomRecipe(counting)
    for _ in range(3):  # the second step is recorded, the third repeats the recording
        assert_equal(run(module, recipe), wanted)
    found = te.gemm_report().counts
    assert {key: 3 * n for key, n in counts.items()} == found
    assert {kind for _, _, kind in found} == {"fp8"}
    kind = "grouped_linear" if name == "grouped" else "linear"
    tensors = ("input", "weight", "grad_output")
    layers = {layer for layer, _, _ in found}
    assert set(roles) == {te.QuantizerRole(kind, t, layer) for t in tensors for layer in layers}
    assert len(roles) == len(set(roles))


@pytest.mark.parametrize("checkpoint", [te.checkpoint, torch.utils.checkpoint.checkpoint])
@pytest.mark.parametrize(("factory", "same"), SAME, ids=["current", "blocks"])
def test_in_checkpoints(factory, same, checkpoint) -> None:
    module = MODULES["mlp"]("cpu")
    call = partial(checkpoint, module, use_reentrant=False)
    assert_equal(run(module, CustomRecipe(factory), call), run(module, same))


@pytest.mark.parametrize(("factory", "same"), SAME, ids=["current", "blocks"])
@pytest.mark.parametrize("name", ["linear", "mlp", "layer"])
def test_compiled(name, factory, same) -> None:
    module = MODULES[name]("cpu")
    call = torch.compile(module, fullgraph=True, backend="aot_eager")
    wanted = run(module, same)
    for recipe in (CustomRecipe(factory), CustomRecipe(factory)):
        assert_equal(run(module, recipe, call), wanted)


def test_graphs_are_made_for_names_and_functions() -> None:
    def by_name(role: te.QuantizerRole) -> Any:
        return Current(E4M3, force_pow_2_scales=role.name == "second", amax_epsilon=0.5)

    pair = [te.Linear(64, 64, device="cpu", name=name) for name in ("first", "second")]
    model, recipe = nn.Sequential(*pair), CustomRecipe(by_name)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one in (recipe, CustomRecipe(as_current), CustomRecipe(lambda role: None), recipe):
        assert_equal(run(model, one, call), run(model, one))
    pair[1].name = "third"
    assert_equal(run(model, recipe, call), run(model, recipe))


def _by_number(number: int) -> Any:
    return Current(E4M3, amax_epsilon=5.0 * number)


def _in_blocks(number: int) -> Any:
    return Blocks(E4M3, block_scaling_dim=1, amax_epsilon=5.0 * number)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("made", [_by_number, _in_blocks])
def test_graphs_are_made_for_each_of_many_recipes(made, dynamic) -> None:
    """Dynamo makes symbols of numbers that change, for which a graph would serve all recipes."""
    module = MODULES["linear"]("cpu")

    def called(x: torch.Tensor, recipe: CustomRecipe) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return module(x)

    torch.compiler.reset()  # graphs of other cases count, too
    call = torch.compile(called, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for i in range(4):
        recipe, x = CustomRecipe(lambda role, i=i: made(i)), torch.randn(16 + i, 64)
        assert torch.equal(call(x, recipe), called(x, recipe))


def test_one_layer_in_high_precision() -> None:
    module = te.LayerNormMLP(64, 128, device="cpu", name="mlp")
    recipe = CustomRecipe(lambda role: None if role.name.endswith("fc2") else as_current(role))
    te.gemm_report(reset=True)
    run(module, recipe)
    kinds = {(layer, kind) for layer, _, kind in te.gemm_report().counts}
    assert kinds == {("mlp.fc1", "fp8"), ("mlp.fc2", "fp32")}


def seen(quantizer: Any, x: torch.Tensor, columnwise: bool) -> torch.Tensor:
    """Returns the values of the codes that a GEMM reads: row-wise or column-wise."""
    if quantizer is None:
        return x
    one = quantizer.copy()
    if isinstance(one, te.Float8BlockQuantizer):
        one.set_usage(rowwise=not columnwise, columnwise=columnwise)
    return one(x).dequantize()


MIXED = {
    "E5M2 weights, powers of two": {
        "input": Current(E4M3, force_pow_2_scales=True),
        "weight": Current(E5M2),
        "grad_output": Current(E4M3, amax_epsilon=0.5),
    },
    "blocks of other shapes": {
        "input": Blocks(E4M3, block_scaling_dim=2),
        "weight": Blocks(E4M3, block_scaling_dim=1, force_pow_2_scales=False),
        "grad_output": Blocks(E4M3, block_scaling_dim=1, amax_epsilon=0.5),
    },
    "gradients in high precision": {"input": Current(E5M2), "weight": Current(E4M3)},
    "nothing": {},
}


@pytest.mark.parametrize("made", MIXED.values(), ids=MIXED)
def test_mixed_quantizers_by_their_definition(made, device) -> None:
    module = te.Linear(256, 128, bias=False, device=device)
    torch.manual_seed(0)
    x = torch.randn(64, 256, device=device, requires_grad=True)
    grad, weight = torch.randn(64, 128, device=device), module.weight.detach()
    with te.autocast(recipe=choosing(**made)):
        y = module(x)
    y.backward(grad)
    input, of_weight, of_grad = [made.get(t) for t in ("input", "weight", "grad_output")]
    rows = of_grad is None  # then the backward reads the codes of the forward
    x_rows, w_rows = seen(input, x.detach(), False), seen(of_weight, weight, False)
    x_columns, w_columns = seen(input, x.detach(), not rows), seen(of_weight, weight, not rows)
    wanted = [
        x_rows @ w_rows.T,
        seen(of_grad, grad, False) @ w_columns,
        seen(of_grad, grad, True).T @ x_columns,
    ]
    for found, one in zip([y.detach(), x.grad, module.weight.grad], wanted, strict=True):
        assert (found - one).norm() < (1e-2 if device == "cuda" else 1e-6) * one.norm()


class Halves(Fp8Quantizer):
    """A scale that never changes."""

    scaling = "halves"

    def operands(self, x, request):
        return self.cast_with(x, request, scales=torch.tensor([2.0, 0.5]))


def test_quantizers_of_its_own() -> None:
    module = MODULES["linear"]("cpu")
    made = dict.fromkeys(("input", "weight", "grad_output"), Halves(int(E4M3)))
    y = run(module, choosing(**made))[0]
    torch.manual_seed(0)
    x, one = torch.randn(32, 2, 64), Delayed(torch.tensor([0.5]), torch.zeros(1), E4M3)
    x, w = [one(t.detach()).dequantize() for t in (x, module.weight)]
    assert (y - (x @ w.T + module.bias)).abs().max() < 1e-6
    with pytest.raises(Exception, match=r"in compiled code, got a quantizer of another kind"):
        run(module, choosing(**made), torch.compile(module, fullgraph=True, backend="aot_eager"))


def test_equality_and_repr_tell_functions_apart() -> None:
    class Chooser:
        def __call__(self, role: te.QuantizerRole) -> None:
            return None

        def __repr__(self) -> str:
            return "Chooser()"

    functions = [as_current, as_blocks, lambda role: None, lambda role: None, Chooser(), Chooser()]
    recipes = [CustomRecipe(function) for function in functions]
    assert len({repr(recipe) for recipe in recipes}) == len(set(recipes)) == len(functions)
    again = CustomRecipe(as_current)
    assert (
        again == recipes[0] and repr(again) == repr(recipes[0]) and hash(again) == hash(recipes[0])
    )
    assert CustomRecipe(as_current, quantization_alignment=32) != again
    assert "as_current" in repr(again) and again.custom() and not again.float8_current_scaling()
    copies = copy.copy(again), copy.deepcopy(again), pickle.loads(pickle.dumps(again))
    assert all(one == again and one.answers is not again.answers for one in copies)


def test_a_cached_weight_serves_quantizers_that_cast_alike() -> None:
    module, x = MODULES["linear"]("cpu"), torch.randn(16, 64)
    weights = [Current(E4M3), Current(E4M3, force_pow_2_scales=True), Current(E5M2)]
    weights += [Current(E4M3, amax_epsilon=5.0)]
    recipes = [choosing(input=Current(E4M3), weight=one) for one in weights]

    def called(recipe: CustomRecipe, first: bool | None) -> torch.Tensor:
        with torch.no_grad(), te.autocast(recipe=recipe):
            return module(x, is_first_microbatch=first)

    wanted = [called(recipe, None) for recipe in recipes]
    for cached in recipes:
        for recipe, one in zip(recipes, wanted, strict=True):
            called(cached, True)
            assert torch.equal(called(recipe, False), one)


def test_modules_can_be_saved_and_copied(tmp_path: Path) -> None:
    module, recipe = MODULES["linear"]("cpu"), CustomRecipe(lambda role: Current(E4M3))
    wanted = run(module, recipe)
    with te.autocast(recipe=recipe):
        assert module.fp8_meta["recipe"] is recipe and "fp8_max_fwd" not in module.fp8_meta
    torch.save(module.state_dict(), tmp_path / "state.pt")
    assert module.state_dict()["_extra_state"].numel() == 0
    other = MODULES["linear"]("cpu")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for one in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_equal(run(one, recipe), wanted)


def test_quantize_asks_for_its_name() -> None:
    operation = te.ops.Quantize(backward=True, name="cast")
    x = torch.randn(16, 32, requires_grad=True)
    recipe = CustomRecipe(lambda role: as_current(role) if role.name == "cast" else None)
    with te.autocast(recipe=recipe):
        y = operation(x)
        plain = te.ops.Quantize(backward=True, name="other")(x)
    assert torch.equal(y.dequantize(), Current(E4M3)(x.detach()).dequantize())
    assert torch.equal(plain, x)


def test_programs_of_torch_export() -> None:
    x = torch.randn(16, 64)
    chosen = CustomRecipe(as_current), CustomRecipe(lambda role: None)
    for module in (MODULES["linear"]("cpu"), te.ops.Quantize()):
        for recipe in chosen:
            with torch.no_grad(), te.autocast(recipe=recipe):
                program = torch.export.export(module, (x,), strict=True)
                wanted = module(x)
                plain = wanted.dequantize() if hasattr(wanted, "dequantize") else wanted
                assert torch.equal(program.module()(x), plain)


def test_the_debugger_sees_the_quantizers_in_use(tmp_path: Path) -> None:
    stats = ["underflows%", "fp8_current_scaling_underflows%", "fp8_block_scaling_underflows%"]
    sections = [
        section("LogFp8TensorStats", tensors=["activation"], stats=stats),
        section("DumpTensors", tensors=["activation"], quantized_tensor=True),
    ]
    found = []
    for recipe in (Float8CurrentScaling(), CustomRecipe(as_current)):
        folder = tmp_path / type(recipe).__name__
        with debugging(folder, *sections):
            run(MODULES["linear"]("cpu"), recipe)
            debug_api.step()
        file = next(folder.glob("**/fc_activation.pt"))
        found.append((logged(folder), torch.load(file, weights_only=True)["quantized"]["rowwise"]))
    (rows, codes), (own_rows, own_codes) = found
    assert own_rows == rows and rows[0, "fc", "activation"].keys() == set(stats)
    assert torch.equal(own_codes["codes"], codes["codes"]) and own_codes["format"] == "E4M3"
