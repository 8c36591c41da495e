"""torch.compile(fullgraph=True): modules and the GPT example give eager results, compiled once.

The GPT covers rotary embedding. `InferenceParams` is not compiled, because it is state in Python.
"""

import copy
import re
from typing import NamedTuple

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from gpt.model import Gpt
from gpt.settings import SIZES, Settings
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast

HIDDEN, FFN, HEADS = 64, 128, 4
RECIPES = {
    None: None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "attention": DelayedScaling(amax_history_len=4, fp8_dpa=True),
}


class Attention(nn.Module):
    """DotProductAttention of one input.

    The values are detached, so that only two gradients are added: their order changes nothing.
    """

    def __init__(self, **arguments):
        super().__init__()
        self.core = te.DotProductAttention(HEADS, HIDDEN // HEADS, **arguments)

    def forward(self, x):
        heads = x.view(*x.shape[:-1], HEADS, HIDDEN // HEADS)
        return self.core(heads, heads, heads.detach())


def build(kind, dtype, device):
    if kind == "Gpt":
        sizes = {**SIZES["tiny"], "layers": 2, "hidden": HIDDEN, "heads": HEADS}
        others = {"model": "te", "precision": "fp8", "recipe": "delayed", "data": None}
        numbers = {"dropout": 0.0, "seed": 0, "validate_every": 1}
        return Gpt(Settings(**sizes, **others, **numbers, device=device))
    if kind == "DotProductAttention":
        return Attention()
    options = {"params_dtype": dtype, "device": device}
    if kind == "TransformerLayer":
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return te.TransformerLayer(HIDDEN, FFN, HEADS, **dropout, **options)
    if kind == "MultiheadAttention":
        return te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, **options)
    if kind in ("LayerNorm", "RMSNorm"):
        return getattr(te, kind)(HIDDEN, **options)
    return getattr(te, kind)(HIDDEN, FFN, **options)


class Case(NamedTuple):
    """What is compiled, and how.

    Attributes:
        kind: name of the module's class.
        dtype: dtype of parameters and inputs; for the GPT, the dtype of torch.autocast.
        recipe: a key of RECIPES.
        inside: whether `fp8_autocast` is entered in compiled code.
        dynamic: whether sizes are symbols.
        training: whether gradients are compared, too.
    """

    kind: str
    dtype: torch.dtype
    recipe: str | None
    inside: bool
    dynamic: bool
    training: bool

    def __str__(self):
        words = [self.kind, str(self.dtype).removeprefix("torch."), self.recipe or "plain"]
        words.append("inside" if self.inside else "outside")
        words.append("dynamic" if self.dynamic else "static")
        return "-".join([*words, "training" if self.training else "inference"])

    def input(self, length, device):
        if self.kind == "Gpt":
            return torch.randint(256, (2, length), device=device)
        return torch.randn(length, 2, HIDDEN, dtype=self.dtype, device=device)

    def step(self, module, x, autocast):
        """Output and gradients; the call is within `fp8_autocast` if `autocast` is True."""
        x = x.detach().requires_grad_(self.training and x.is_floating_point())
        module.zero_grad()
        with torch.set_grad_enabled(self.training), scope(self.recipe if autocast else None):
            y = module(x)
        if not self.training:
            return [y]
        y.float().square().sum().backward()
        gradients = [x.grad, *(p.grad for p in module.parameters())]
        return [y.detach(), *(grad for grad in gradients if grad is not None)]


def scope(recipe):
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=RECIPES[recipe])


class Mixed(nn.Module):
    """A module with the autocasts that compiled code enters in this case."""

    def __init__(self, module, case):
        super().__init__()
        self.module, self.case = module, case

    def forward(self, x):
        case = self.case
        mixed = case.kind == "Gpt" and case.dtype is not torch.float32
        with torch.autocast(x.device.type, torch.bfloat16, enabled=mixed):
            if not case.inside:
                return self.module(x)
            with scope(case.recipe):
                return self.module(x)


def run(case, device, backend, compare, mode=None):
    torch._dynamo.reset()
    reset_autocast()  # so that compiled code is the first to use the recipe
    torch.manual_seed(0)
    eager = Mixed(build(case.kind, case.dtype, device), case)
    compiled = copy.deepcopy(eager)
    compiled.compile(fullgraph=True, backend=backend, mode=mode, dynamic=case.dynamic or None)
    warm, steady = ([8, 16], [8, 24, 32]) if case.dynamic else ([8], [8, 8, 8])
    for length in warm:
        x = case.input(length, device)
        results = [case.step(module, x, not case.inside) for module in (compiled, eager)]
        compare(*results)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in steady:
            x = case.input(length, device)
            results = [case.step(module, x, not case.inside) for module in (compiled, eager)]
            compare(*results)
    scales = [states(module) for module in (compiled, eager)]
    for got, wanted in zip(*scales, strict=True):
        compare([got], [wanted])


def states(module):
    """Scales and histories, after the updates that compiled code has deferred."""
    with te.fp8_autocast():
        pass
    found = (getattr(one, "scaling", {}) for one in module.modules())
    return [
        tensor
        for scaling in found
        for state in scaling.values()
        for tensor in (state.scale, state.amax_history)
    ]


def bitwise(results, expected):
    for got, wanted in zip(results, expected, strict=True):
        assert_bitwise(got, wanted)


def near(results, expected):
    """Compares within 5%: fused kernels round differently, which may change an FP8 code."""
    for got, wanted in zip(results, expected, strict=True):
        error = (got.double() - wanted.double()).norm()
        assert error <= 0.05 * wanted.double().norm() + 1e-6


BF16, FP32 = torch.bfloat16, torch.float32
QUICK = (
    Case("Linear", BF16, "delayed", True, True, True),
    Case("LayerNorm", BF16, None, False, False, True),
    Case("RMSNorm", FP32, None, False, True, False),
    Case("LayerNormLinear", FP32, "current", True, False, True),
    Case("LayerNormMLP", BF16, "delayed", False, True, True),
    Case("DotProductAttention", BF16, None, False, True, True),
    Case("DotProductAttention", BF16, "attention", True, True, True),
    Case("DotProductAttention", FP32, "attention", False, False, True),
    Case("MultiheadAttention", BF16, "attention", True, True, True),
    Case("MultiheadAttention", FP32, "delayed", True, True, False),
    Case("MultiheadAttention", BF16, "current", False, False, True),
    Case("TransformerLayer", BF16, "current", True, True, True),
    Case("TransformerLayer", BF16, None, False, False, False),
    Case("Gpt", BF16, "delayed", True, False, True),
    Case("Gpt", BF16, None, False, True, False),
)


@pytest.mark.sampled_on_cpu(  # other cases take up to half a minute
    *("LayerNorm", "RMSNorm", "MultiheadAttention-bfloat16-current"),
    "DotProductAttention-float32-attention",
)
@pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_eager(case, device):
    # Gradients of attention are not deterministic on a GPU.
    run(case, device, "aot_eager", bitwise if device == "cpu" else near)


@pytest.mark.sampled_on_cpu("LayerNormMLP")  # TransformerLayer takes twenty seconds
@pytest.mark.parametrize(
    "case",
    (
        Case("LayerNormMLP", BF16, "delayed", True, True, True),
        Case("TransformerLayer", FP32, "current", False, False, True),
    ),
    ids=str,
)
def test_inductor(case, device):
    run(case, device, "inductor", near)


@pytest.mark.gpu
# torch captures an empty graph to create a memory pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    "case",
    (
        Case("LayerNormMLP", BF16, "delayed", False, False, True),
        Case("TransformerLayer", BF16, "current", False, False, True),
        Case("TransformerLayer", BF16, None, False, False, False),
    ),
    ids=str,
)
def test_cuda_graphs_of_inductor(case):
    """Its memory pools own all memory allocated in a graph; our workspaces outlive the pools."""
    run(case, "cuda", "inductor", near, mode="reduce-overhead")


def test_calibration(device):
    """After a calibration in compiled code, scales are updated as after one in eager mode."""
    reset_autocast()
    eager = te.Linear(HIDDEN, FFN, device=device)
    twin = copy.deepcopy(eager)

    def calibrate(module, x):
        with te.fp8_autocast(enabled=False, calibrating=True):
            return module(x)

    x = torch.randn(16, HIDDEN, device=device)
    with torch.no_grad():
        torch.compile(calibrate, fullgraph=True, backend="aot_eager")(twin, x)
        calibrate(eager, x)
    bitwise(states(twin), states(eager))
    assert not torch.equal(twin.scaling["forward"].scale[:2].cpu(), torch.ones(2))


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("tokens", [16, 5])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_micro_batches_and_gradients_in_place(recipe, tokens, device):
    """Cached weights and `main_grad` outlive the graphs that write them."""
    reset_autocast()
    torch._dynamo.reset()
    eager = te.LayerNormLinear(HIDDEN, FFN, fuse_wgrad_accumulation=True, device=device)
    twin = copy.deepcopy(eager)
    for module in (eager, twin):
        module.weight.main_grad = torch.zeros(FFN, HIDDEN, device=device)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for first in (True, False, True, False):
        x = torch.randn(tokens, HIDDEN, device=device)
        outputs = []
        for module in (compiled, eager):
            with scope(recipe):
                outputs.append(module(x, is_first_microbatch=first))
            outputs[-1].square().sum().backward()
        assert_bitwise(*outputs)
        cached = twin.chain.stages[-1].cached_weight[1]
        assert not cached.rowwise.scales.requires_grad  # else they would keep a graph alive
    assert_bitwise(twin.weight.main_grad, eager.weight.main_grad)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_tokens_that_must_be_padded(recipe, device):
    """Tensors that a stage saves for the backward are not views of longer, padded tensors."""
    reset_autocast()
    torch._dynamo.reset()
    case = Case("LayerNormMLP", BF16, recipe, False, False, True)
    eager = build(case.kind, case.dtype, device)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(5, HIDDEN, dtype=BF16, device=device)
        results = [case.step(module, x, True) for module in (compiled, eager)]
        (bitwise if torch.device(device).type == "cpu" else near)(*results)


def test_warnings_break_no_graph(device):
    """Layers that warn: one with a size that FP8 does not support, and FP8 weights without FP8."""
    reset_autocast()
    torch._dynamo.reset()
    with te.fp8_model_init():
        fp8_weights = te.Linear(HIDDEN, FFN, device=device, name="kept")
    odd = te.Linear(HIDDEN - 4, FFN, device=device, name="odd")
    for module, recipe, words in (
        (odd, "current", "(layer odd)"),
        (fp8_weights, None, "kept in FP8"),
    ):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x = torch.randn(16, module.in_features, device=device)
        with pytest.warns(UserWarning, match=re.escape(words)), scope(recipe):
            y = compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"), scope(recipe):
            assert_bitwise(compiled(x), y)


KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
PLAIN_KINDS = ("LayerNorm", "RMSNorm", "DotProductAttention")
MODES = ((False, True), (True, True), (True, False))  # (dynamic, training)
ALL = [
    Case(kind, BF16, recipe, inside, *mode)
    for kind in (*KINDS, *PLAIN_KINDS, "Gpt")
    for recipe in ((None,) if kind in PLAIN_KINDS else (None, "delayed", "current"))
    for inside in ((False,) if recipe is None else (False, True))
    for mode in MODES
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_combination_on_a_gpu(case):
    run(case, "cuda", "aot_eager", near)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in ALL if case.dynamic and case.training], ids=str)
def test_inductor_on_a_gpu(case):
    run(case, "cuda", "inductor", near)


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_autocast_outside_and_inside(recipe, device):
    """With one recipe inside the graph and another one around it, all scales are updated."""
    inner = DelayedScaling(amax_history_len=2)

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (te.Linear(64, 64, device=device) for _ in "123")

        def forward(self, x):
            x = self.first(x)
            with te.fp8_autocast(fp8_recipe=inner):
                x = self.second(x)
            return self.third(x)

    found = []
    for compiles in (True, False):
        reset_autocast()
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Three()
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        for _ in range(3):
            x = torch.randn(16, 64, device=device)
            with scope(recipe):
                y = call(x)
            y.square().sum().backward()
        found.append([y.detach(), *states(model)])
    (bitwise if device == "cpu" else near)(*found)
