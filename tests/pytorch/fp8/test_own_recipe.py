"""Recipes that users define: a dataclass, and rules that are registered for it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from debug_session import debugging, logged, section
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    Recipe,
)
from transformer_engine.pytorch.dtypes import E4M3, E5M2
from transformer_engine.pytorch.fp8.casts.quantizers import Fp8Quantizer, GemmQuantizers
from transformer_engine.pytorch.fp8.process_state import Scope
from transformer_engine.pytorch.fp8.recipe_quantizers import build_quantizers
from transformer_engine.pytorch.fp8.recipes import base
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.fp8.recipes.delayed import DelayedRules
from transformer_engine.pytorch.scale_layout import WHOLE


@dataclass(frozen=True)
class PowersOfTwo(Recipe):
    """Current scaling with scales that are powers of two, and gradients in E4M3."""

    fp8_format: Format = Format.E4M3


class PowersOfTwoRules(base.RecipeRules):
    scaling = "fp8_power_of_2_scaling"
    exportable = True

    def gemm_quantizers(self, recipe, columns):
        three = [CurrentQuantizer(E4M3, power_of_2=True) for _ in range(3)]
        gemms = GemmQuantizers(*three)
        gemms.fast_accumulation = (False, False, False)
        return gemms

    def weight_layout(self, recipe):
        return WHOLE


@dataclass(frozen=True)
class Fixed(Recipe):
    """Scales that never change."""

    fp8_format: Format = Format.HYBRID
    scale: float = 64.0


class FixedQuantizer(Fp8Quantizer):
    scaling = "fixed"

    def __init__(self, format, scale):
        super().__init__(format)
        self.scales = torch.tensor([1.0 / scale, scale])

    @property
    def cache_key(self):
        return self.scaling, float(self.scales[1])

    def operands(self, x, request):
        return self.cast_with(x, request, scales=self.scales)


class FixedRules(base.RecipeRules):
    def gemm_quantizers(self, recipe, columns):
        formats = E4M3, E4M3, self.backward_format(recipe)
        scales = recipe.scale, recipe.scale, 256 * recipe.scale
        return GemmQuantizers(*map(FixedQuantizer, formats, scales))


@dataclass(frozen=True)
class WithState(Recipe):
    """The fields of `DelayedScaling`, in a class that does not inherit from it."""

    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 4
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = False
    margin: int = 0


SAME = Float8CurrentScaling(
    use_power_2_scales=True, fp8_format=Format.E4M3, fp8_gemm_fprop=MMParams(True)
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch) -> None:
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))
    base.register(PowersOfTwo)(PowersOfTwoRules)
    base.register(Fixed)(FixedRules)
    base.register(WithState)(DelayedRules)


def trained(module: nn.Module, recipe: Recipe, steps: int = 3) -> list[torch.Tensor]:
    """The output and the input's gradient of each step, and the parameters after the last step."""
    torch.manual_seed(1)
    device = next(module.parameters()).device
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results = []
    for _ in range(steps):
        x = torch.randn(32, 64, device=device, requires_grad=True)
        with te.fp8_autocast(fp8_recipe=recipe):
            y = module(x)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        results += [y.detach(), x.grad]
    return [*results, *(p.detach() for p in module.parameters())]


def layers(kind: type[nn.Module], device: str) -> list[nn.Module]:
    pair = [kind(64, 128, device=device) for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
@pytest.mark.parametrize(
    ("own", "same"),
    [(PowersOfTwo(), SAME), (WithState(), DelayedScaling(amax_history_len=4))],
    ids=["stateless", "with_state"],
)
def test_it_trains_as_its_equal_does(device: str, kind, own: Recipe, same: Recipe) -> None:
    first, second = layers(kind, device)
    results = zip(trained(first, own), trained(second, same), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in results)
    assert bool(first.scaling) is isinstance(own, WithState)
    kinds = {gemm for (_, _, gemm) in te.gemm_report(reset=True).counts}
    assert kinds == {"fp8"}


def test_a_quantizer_of_its_own_needs_nothing_but_operands() -> None:
    torch.manual_seed(0)
    module = te.LayerNormMLP(64, 128, device="cpu")
    x = torch.randn(32, 64)

    def run(enabled: bool) -> list[torch.Tensor]:
        module.zero_grad()
        with te.fp8_autocast(enabled=enabled, fp8_recipe=Fixed()):
            y = module(x)
        y.square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in module.parameters())]

    for got, exact in zip(run(True), run(False), strict=True):
        assert 0 < (got - exact).norm() < 0.1 * exact.norm()


def test_compiled_equals_eager() -> None:
    first, second = layers(te.LayerNormLinear, "cpu")
    compiled = torch.compile(second, fullgraph=True, backend="aot_eager")
    results = zip(trained(first, PowersOfTwo()), trained(compiled, PowersOfTwo()), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in results)


def test_weights_in_fp8_alone() -> None:
    with te.quantized_model_init(recipe=PowersOfTwo()):
        layer = te.Linear(64, 128, device="cpu")
    assert isinstance(layer.weight, te.Float8Tensor)
    with te.fp8_autocast(fp8_recipe=PowersOfTwo()):
        layer(torch.randn(16, 64)).sum().backward()
    mismatch = "made for per-tensor scaling, got Fixed"
    with te.fp8_autocast(fp8_recipe=Fixed()), pytest.raises(RuntimeError, match=mismatch):
        layer(torch.randn(16, 64))
    with pytest.raises(ValueError, match="expected a recipe that FP8 weights can serve, got Fixed"):
        te.quantized_model_init(recipe=Fixed())


def test_statistics_know_it_by_name(tmp_path: Path) -> None:
    stats = section("LogFp8TensorStats", tensors=["activation"], stats=["underflows%"])
    with debugging(tmp_path, stats):
        layer = te.Linear(64, 128, device="cpu", name="one")
        with te.fp8_autocast(fp8_recipe=PowersOfTwo()):
            layer(torch.randn(16, 64)).sum().backward()
        debug_api.step()
    assert logged(tmp_path)[0, "one", "activation"] == {"underflows%": 0.0}


@pytest.mark.parametrize("recipe", [PowersOfTwo(), Fixed()], ids=str)
def test_features_of_the_debugger_take_it(tmp_path: Path, recipe: Recipe) -> None:
    dump = section("DumpTensors", tensors=["activation", "gradient"], quantized_tensor=True)
    with debugging(tmp_path, dump):
        layer = te.Linear(64, 128, device="cpu", name="one")
        with te.fp8_autocast(fp8_recipe=recipe):
            layer(torch.randn(3, 4, 64)).sum().backward()
    file = next(tmp_path.glob("**/one_activation.pt"))
    sides = torch.load(file, weights_only=True)["quantized"]
    assert sides["rowwise"]["codes"].shape == (3, 4, 64) and sides["rowwise"]["format"] == "E4M3"
    assert sides["columnwise"]["codes"].shape == (64, 12)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # raised by torch itself
def test_as_a_graph_of_onnx() -> None:
    pytest.importorskip("onnxscript")
    layer = te.Linear(64, 128, device="cpu").eval()

    def exported(recipe: Recipe) -> list[str]:
        with te.fp8_autocast(fp8_recipe=recipe), te.onnx_export(enabled=True):
            program = torch.onnx.export(layer, (torch.randn(16, 64),), verbose=False)
        return [node.op_type for node in program.model.graph]

    assert exported(PowersOfTwo()).count("QuantizeLinear") == 2
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as error:
        exported(Fixed())
    assert "Fixed cannot be exported: export under another recipe" in str(error.value.__cause__)


def test_subclasses_have_the_rules_of_the_nearest_class() -> None:
    class Trainers(DelayedScaling):
        pass

    class Others(PowersOfTwo):
        pass

    @base.register(Others)
    class OthersRules(PowersOfTwoRules):
        def backward_format(self, recipe):
            return E5M2

    assert type(base.rules_of(Trainers())) is DelayedRules
    assert type(base.rules_of(PowersOfTwo())) is PowersOfTwoRules
    assert type(base.rules_of(Others())) is OthersRules
    assert base.rules_of(Others()).backward_format(Others()) == E5M2
    layer = te.Linear(64, 128, device="cpu")
    with te.fp8_autocast(fp8_recipe=Trainers(amax_history_len=2)):
        layer(torch.randn(16, 64)).sum().backward()
    assert layer.scaling["backward"].amax_history.shape == (2, 2)


def test_what_is_not_registered_is_refused() -> None:
    @dataclass(frozen=True)
    class Unknown(Recipe):
        fp8_format: Format = Format.E4M3

    names = "DelayedScaling, Float8CurrentScaling, .*PowersOfTwo, Fixed or WithState"
    for function in (te.autocast, te.quantized_model_init):
        with pytest.raises(ValueError, match=f"expected recipe to be {names}.*, got .*Unknown"):
            function(recipe=Unknown())
    with pytest.raises(ValueError, match="expected a recipe without rules, got DelayedScaling"):
        base.register(DelayedScaling)


def test_what_outlives_a_call() -> None:
    """Recordings must know the scales that casts read and the amaxes that casts update."""
    layer = te.LayerNormMLP(64, 128, device="cpu")

    def persistent(recipe: Recipe, recording: bool = True) -> list[list[torch.Tensor]]:
        scope, device = Scope(enabled=True, recipe=recipe), torch.device("cpu")
        built = build_quantizers(layer, scope, recording, device).gemms
        return [list(gemm.persistent_tensors()) for gemm in built]

    assert persistent(SAME) == persistent(PowersOfTwo()) == [[], []]
    with te.fp8_autocast(fp8_recipe=DelayedScaling()):
        found = persistent(DelayedScaling())
        evaluated = persistent(DelayedScaling(), recording=False)
    forward, backward = layer.scaling["forward"], layer.scaling["backward"]
    for gemm, tensors in enumerate(found):
        columns = [(forward, 3 * gemm), (forward, 3 * gemm + 1), (backward, 2 * gemm)]
        wanted = [t for state, i in columns for t in (state.scales[i], state.amaxes[i])]
        assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in wanted]
        assert [t.data_ptr() for t in evaluated[gemm]] == [t.data_ptr() for t in wanted[::2]]
