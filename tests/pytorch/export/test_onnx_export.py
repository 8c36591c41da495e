"""`onnx_export`: every module as ONNX, high precision and FP8, equal to eager in onnxruntime."""

import copy

import pytest
import torch
from onnx_graphs import (
    FFN,
    HEADS,
    HIDDEN,
    RECIPES,
    Calls,
    check,
    error_of,
    export,
    listed,
    onnx,
    run,
    scope,
    trained,
)
from torch import nn

import transformer_engine.pytorch as te
from gpt.model import Gpt
from gpt.settings import SIZES, Settings
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.export.onnx import is_in_onnx_export_mode, te_translation_table
from transformer_engine.pytorch.fp8.recipes.current import CurrentQuantizer
from transformer_engine.pytorch.kernels.amax import current_scales

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # raised by torch itself
    pytest.mark.filterwarnings("ignore:.*in training mode.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*axis name.*:UserWarning"),  # for axes of equal size
]


class Several(nn.Module):
    """Modules with one input; exporting them together takes the time of one."""

    def __init__(self, *modules):
        super().__init__()
        self.several = nn.ModuleList(modules)

    def forward(self, x):
        return tuple(y for module in self.several for y in listed(module(x)))


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_modules(recipe, device):
    model = Several(
        te.Linear(HIDDEN, 48, parameters_split=("a", "b", "c"), device=device),
        te.LayerNormLinear(HIDDEN, 32, return_layernorm_output=True, device=device),
        te.LayerNormLinear(HIDDEN, 32, normalization="RMSNorm", return_bias=True, device=device),
        te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", zero_centered_gamma=True, device=device),
    )
    proto = check(model, (torch.randn(2, 8, HIDDEN),), (torch.randn(3, 16, HIDDEN),), recipe)
    operators = [node.op_type for node in proto.graph.node]
    casts = operators.count("QuantizeLinear")
    assert casts == 0 if recipe is None else casts > 5  # casts of 5 weights and of inputs
    assert operators.count("DequantizeLinear") == casts


@pytest.mark.parametrize("optimize", [True, False], ids=["optimized", "plain"])
def test_static_shapes(optimize):
    """With static shapes, onnxruntime can move casts to other places of the graph."""
    inputs = (torch.randn(2, 16, HIDDEN),)
    model = te.LayerNormMLP(HIDDEN, FFN, device="cpu")
    check(model, inputs, inputs, RECIPES["delayed"], None, optimize=optimize)


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_casts_as_operations(kind):
    model = te.ops.Sequential(te.ops.Quantize(), te.ops.ReLU())
    proto = check(model, (torch.randn(2, 16, 32),), (torch.randn(3, 8, 32),), RECIPES[kind])
    assert [node.op_type for node in proto.graph.node].count("QuantizeLinear") == 1


def test_norms_and_activations(device):
    kinds = ["geglu", "qgelu", "reglu", "srelu", "silu", "clamped_swiglu"]  # each function once
    model = Several(
        te.LayerNorm(16, device=device),
        te.RMSNorm(16, zero_centered_gamma=True, device=device),
        *(te.LayerNormMLP(16, 32, activation=kind, device=device) for kind in kinds),
    )
    check(model, (torch.randn(2, 4, 16),), (torch.randn(3, 8, 16),))


def test_the_table_that_programs_for_another_package_pass():
    """The graph is that of an export without the table."""
    model, x = te.LayerNormMLP(HIDDEN, FFN, device="cpu"), (torch.randn(2, 16, HIDDEN),)
    table = {"custom_translation_table": te_translation_table}
    proto = check(model, x, x, RECIPES["delayed"], None, **table)
    assert proto.graph == export(model, x, RECIPES["delayed"], None).graph


def test_scales_that_are_powers_of_2():
    module, recipe = te.Linear(32, 16, device="cpu"), Float8CurrentScaling(use_power_2_scales=True)
    x, other = torch.randn(4, 32), torch.randn(7, 32)
    (got,) = run(export(module.eval(), (x,), recipe, ({0: "batch"},)), (other,))
    with torch.no_grad(), scope(recipe):
        torch.testing.assert_close(got, module(other))  # dividing by such a scale is exact
    for exponent in range(-20, 20):  # 448 / amax at, and next to, powers of two
        edge = torch.tensor(448.0 * 2.0**exponent)
        for amax in (edge, edge.nextafter(edge * 2), edge.nextafter(edge / 2)):
            quantizer = CurrentQuantizer(5, power_of_2=True)
            wanted = current_scales(amax.view(1), 5, True, 0.0)[1]
            assert quantizer.exported_scale(amax.view(1)) == wanted


def test_scales_are_the_trained_ones():
    module, recipe = te.Linear(32, 16, device="cpu"), RECIPES["delayed"]
    x = torch.randn(4, 32)
    trained(module, (x,), recipe)
    before = copy.deepcopy(module.scaling)
    proto = export(module, (x,), recipe, ({0: "batch"},))
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    casts = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    found = [1 / constants[node.input[1]].item() for node in casts]
    assert found == pytest.approx(before["forward"].scale[:2].tolist())
    assert found[0] != 1.0
    types = {constants[node.input[2]].dtype.name for node in casts}
    assert types == {"float8_e4m3fn"}
    for direction, state in before.items():  # an export changes no scales
        assert torch.equal(state.scale, module.scaling[direction].scale)
        assert torch.equal(state.amax_history, module.scaling[direction].amax_history)


def test_masks_of_positions():
    def core(kind, **arguments):
        return te.DotProductAttention(
            HEADS, 16, qkv_format="bshd", attn_mask_type=kind, **arguments
        )

    model = Calls(
        (core("no_mask"), {"core_attention_bias_type": "alibi"}),
        (core("causal", softmax_type="off-by-one"), {}),
        (core("causal", window_size=(3, 0)), {}),
        (core("causal_bottom_right", window_size=(2, 0)), {}),
    )
    size = (HEADS, 16)

    def inputs(batch, queries, keys):
        query = torch.randn(batch, queries, *size)
        return query, torch.randn(batch, keys, *size), torch.randn(batch, keys, *size)

    keys = {0: "batch", 1: "keys"}
    dynamic = (({0: "batch", 1: "queries"}, keys, keys),)
    check(model, inputs(2, 8, 12), inputs(3, 14, 9), dynamic=dynamic)


class Masked(nn.Module):
    """Attention whose masks and biases are inputs of the graph."""

    def __init__(self):
        super().__init__()
        self.core = te.DotProductAttention(HEADS, 16, num_gqa_groups=2, qkv_format="sbhd")

    def forward(self, query, key, padding, arbitrary, bias):
        attend = self.core
        return (
            attend(query, key, key, padding, attn_mask_type="padding_causal"),
            attend(query, key, key, arbitrary, attn_mask_type="arbitrary"),
            attend(
                query,
                key,
                key,
                attn_mask_type="no_mask",
                core_attention_bias_type="pre_scale_bias",
                core_attention_bias=bias,
            ),
        )


def test_masks_that_are_tensors():
    def inputs(batch, length):
        padding = torch.arange(length) >= torch.randint(1, length, (batch, 1))
        arbitrary = torch.rand(length, length) < 0.3
        arbitrary[1] = True  # a query that attends to no key
        return (
            torch.randn(length, batch, HEADS, 16),
            torch.randn(length, batch, 2, 16),
            padding[:, None, None],
            arbitrary,
            torch.randn(1, HEADS, length, length),
        )

    rows = {0: "sequence", 1: "batch"}
    square = {0: "sequence", 1: "sequence"}
    bias = {2: "sequence", 3: "sequence"}
    dynamic = (rows, rows, {0: "batch", 3: "sequence"}, square, bias)
    check(Masked(), inputs(2, 8), inputs(3, 12), dynamic=dynamic)


class Turned(nn.Module):
    """Self attention with rotary embedding, grouped heads and norms of the heads."""

    def __init__(self):
        super().__init__()
        self.attention = te.MultiheadAttention(
            HIDDEN,
            HEADS,
            num_gqa_groups=2,
            input_layernorm=True,
            qk_norm_type="L2Normalization",
            rotary_pos_interleaved=True,
            return_bias=True,
            qkv_format="bshd",
            device="cpu",
        )
        rotary = te.RotaryPositionEmbedding(16, interleaved=True)
        self.register_buffer("angles", rotary(32).cpu(), persistent=False)

    def forward(self, x):
        return self.attention(x, rotary_pos_emb=self.angles)


def test_multihead_attention():
    sequence = torch.export.Dim("sequence", min=2, max=32)
    dynamic = ({0: "batch", 1: sequence},)
    check(Turned(), (torch.randn(2, 8, HIDDEN),), (torch.randn(3, 16, HIDDEN),), dynamic=dynamic)


@pytest.mark.sampled_on_cpu("current")
@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["fp32", "current"])
def test_transformer_layer(recipe, device):
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device=device).eval()
    dynamic = ({0: "sequence", 1: "batch"},)
    check(layer, (torch.randn(8, 2, HIDDEN),), (torch.randn(16, 4, HIDDEN),), recipe, dynamic)


def test_gpt_in_fp8():
    """The model of the example, with the default options of the exporter."""
    small = {"layers": 1, "hidden": 64, "seq": 32, "dropout": 0.1, "seed": 0, "validate_every": 1}
    how = {"data": None, "device": "cpu", "model": "te", "precision": "fp8", "recipe": "delayed"}
    settings = Settings(**{**SIZES["tiny"], **small, **how})
    tokens = torch.randint(256, (2, 8))
    sequence = torch.export.Dim("sequence", min=2, max=32)
    dynamic = ({0: "batch", 1: sequence},)
    others = (torch.randint(256, (3, 16)),)
    check(Gpt(settings), (tokens,), others, RECIPES["delayed"], dynamic)


@pytest.mark.sampled_on_cpu("plain-dtype1", "current-dtype0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["plain", "current"])
def test_half_precision(recipe, dtype, device):
    """fp16 runs on the CPU; for bf16 onnxruntime has too few operators there."""
    module = te.LayerNormMLP(32, 64, params_dtype=dtype, device=device)
    inputs, others = (torch.randn(n, 2, 32, dtype=dtype, device=device) for n in (4, 6))
    if dtype is torch.float16:
        check(module, (inputs,), (others,), recipe, bound=2e-3)
    else:
        proto = export(trained(module, (inputs,), recipe), (inputs,), recipe)
        onnx.checker.check_model(proto, full_check=True)


def test_newer_opset():
    """From opset 21 on, onnxruntime before 1.32 fuses float8 as if it were int8 by default."""
    module, recipe = te.LayerNormLinear(32, 48, device="cpu"), RECIPES["delayed"]
    x = torch.randn(4, 2, 32)
    trained(module, (x,), recipe)
    proto = export(module, (x,), recipe, opset_version=23)
    (got,) = run(proto, (x,))
    with torch.no_grad(), scope(recipe):
        torch.testing.assert_close(got, module(x))


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.filterwarnings("ignore:.*kept in FP8 and is dequantised")
def test_weights_kept_in_fp8(recipe, device):
    with te.fp8_model_init():
        model = te.LayerNormMLP(HIDDEN, FFN, device=device, name="block")
    x = torch.randn(2, 8, HIDDEN, device=device)
    trained(model, (x,), recipe)
    assert "fc1_weight of layer block cannot be exported: call" in error_of(model, (x,), recipe)
    model.requires_grad_(False)
    proto = check(model, (x,), (torch.randn(3, 16, HIDDEN),), recipe)
    casts = [node.op_type for node in proto.graph.node].count("QuantizeLinear")
    assert casts == (0 if recipe is None else 4)  # two inputs, two weights


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.filterwarnings("ignore:.*kept in FP8 and is dequantised")
def test_weights_in_several_parameters_kept_in_fp8(recipe, device):
    """They are joined in high precision, and cast together."""
    with te.fp8_model_init():
        model = te.MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", device=device, name="mha")
    x = torch.randn(2, 8, HIDDEN, device=device)
    trained(model, (x,), recipe)
    assert "query_weight of layer mha.qkv cannot be exported: call" in error_of(model, (x,), recipe)
    model.requires_grad_(False)
    check(model, (x,), (torch.randn(3, 16, HIDDEN),), recipe)


@pytest.mark.filterwarnings("ignore:.*kept in FP8 and is dequantised")
def test_weights_kept_in_blocks():
    """Outside of autocast, the graph contains the dequantised weights."""
    with te.fp8_model_init(recipe=Float8BlockScaling()):
        model = te.Linear(160, 272, device="cpu").requires_grad_(False)
    check(model, (torch.randn(2, 8, 160),), (torch.randn(3, 4, 160),), None)


def test_the_context_nests_and_leaves_eager_calls_alone():
    module, recipe = te.Linear(32, 16, device="cpu"), RECIPES["current"]
    x = torch.randn(16, 32)
    with scope(recipe):
        expected = module(x)
        with te.onnx_export(enabled=True):
            assert is_in_onnx_export_mode()
            with te.onnx_export():
                assert not is_in_onnx_export_mode()
            assert is_in_onnx_export_mode()
            assert torch.equal(module(x), expected)
            assert module(x).requires_grad
    assert not is_in_onnx_export_mode()
