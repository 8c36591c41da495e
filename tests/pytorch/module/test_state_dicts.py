"""Keys, shapes and order of the state dicts of modules, and checkpoints of others that load."""

import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

HIDDEN, FFN, HEADS, GROUPS = 32, 64, 4, 2
HEAD = HIDDEN // HEADS
KV = GROUPS * HEAD

State = list[tuple[str, tuple[int, ...]]]
EXTRA: State = [("_extra_state", (0,))]
NORM: State = [("layer_norm_weight", (HIDDEN,)), ("layer_norm_bias", (HIDDEN,))]
RMS = NORM[:1]


def affine(rows: int, columns: int, bias: bool = True) -> State:
    return [("weight", (rows, columns)), ("bias", (rows,))][: 2 if bias else 1]


def split(parts: dict[str, int], columns: int, bias: bool = True) -> State:
    """All weights, then all biases."""
    weights = [(f"{name}_weight", (rows, columns)) for name, rows in parts.items()]
    return weights + [(f"{name}_bias", (rows,)) for name, rows in parts.items() if bias]


def under(prefix: str, state: State) -> State:
    return [(f"{prefix}.{name}", shape) for name, shape in state]


def mlp(norm: State = NORM, first: int = FFN, bias: bool = True) -> State:
    state = [
        ("fc1_weight", (first, HIDDEN)),
        ("fc1_bias", (first,)),
        ("fc2_weight", (HIDDEN, FFN)),
        ("fc2_bias", (HIDDEN,)),
    ]
    return norm + [one for one in state if bias or "bias" not in one[0]] + EXTRA


def attention(projections: State, bias: bool = True) -> State:
    core = under("core_attention", EXTRA)
    return projections + core + under("proj", affine(HIDDEN, HIDDEN, bias) + EXTRA)


QKV = {"query": HIDDEN, "key": HIDDEN, "value": HIDDEN}
GROUPED = {"query": HIDDEN, "key": KV, "value": KV}
KEYS = {"key": HIDDEN, "value": HIDDEN}
SELF = attention(under("layernorm_qkv", NORM + split(QKV, HIDDEN) + EXTRA))
CROSS = attention(
    under("layernorm_query", NORM + split({"query": HIDDEN}, HIDDEN) + EXTRA)
    + under("key_value", split(KEYS, HIDDEN) + EXTRA)
)
FUSED = attention(under("qkv", affine(3 * HIDDEN, HIDDEN) + EXTRA))

# Class, arguments, and what its state dict holds, in order.
TABLE: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any], State]] = [
    (te.Linear, (32, 48), {}, affine(48, 32) + EXTRA),
    (te.Linear, (32, 48), {"bias": False}, affine(48, 32, False) + EXTRA),
    (te.Linear, (32, 48), {"return_bias": True}, affine(48, 32) + EXTRA),
    (
        te.Linear,
        (32, 48),
        {"parameters_split": ("query_", "key", "value_")},
        split({"query": 16, "key": 16, "value": 16}, 32) + EXTRA,
    ),
    (
        te.Linear,
        (32, 48),
        {"parameters_split": {"a": 32, "b": 16}, "bias": False},
        split({"a": 32, "b": 16}, 32, False) + EXTRA,
    ),
    (te.LayerNorm, (32,), {}, [("weight", (32,)), ("bias", (32,))]),
    (te.LayerNorm, (32,), {"zero_centered_gamma": True}, [("weight", (32,)), ("bias", (32,))]),
    (te.RMSNorm, (32,), {}, [("weight", (32,))]),
    (te.LayerNormLinear, (32, 48), {}, NORM + affine(48, 32) + EXTRA),
    (te.LayerNormLinear, (32, 48), {"normalization": "RMSNorm"}, RMS + affine(48, 32) + EXTRA),
    (te.LayerNormLinear, (32, 48), {"bias": False}, NORM + affine(48, 32, False) + EXTRA),
    (
        te.LayerNormLinear,
        (32, 48),
        {"parameters_split": {"a": 32, "b": 16}},
        NORM + split({"a": 32, "b": 16}, 32) + EXTRA,
    ),
    (te.LayerNormMLP, (HIDDEN, FFN), {}, mlp()),
    (te.LayerNormMLP, (HIDDEN, FFN), {"bias": False}, mlp(bias=False)),
    (te.LayerNormMLP, (HIDDEN, FFN), {"normalization": "RMSNorm"}, mlp(RMS)),
    *(
        (te.LayerNormMLP, (HIDDEN, FFN), {"activation": name}, mlp(first=rows))
        for name, rows in {
            **dict.fromkeys(("relu", "qgelu", "srelu", "silu"), FFN),
            **dict.fromkeys(
                ("geglu", "reglu", "swiglu", "clamped_swiglu", "qgeglu", "sreglu", "glu"), 2 * FFN
            ),
        }.items()
    ),
    (te.DotProductAttention, (HEADS, HEAD), {}, EXTRA),
    (
        te.DotProductAttention,
        (HEADS, HEAD),
        {"softmax_type": "learnable"},
        [("softmax_offset", (HEADS,)), *EXTRA],
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {},
        attention(under("qkv", split(QKV, HIDDEN) + EXTRA)),
    ),
    (te.MultiheadAttention, (HIDDEN, HEADS), {"fuse_qkv_params": True}, FUSED),
    (te.MultiheadAttention, (HIDDEN, HEADS), {"input_layernorm": True}, SELF),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"input_layernorm": True, "normalization": "RMSNorm", "bias": False, "num_gqa_groups": 2},
        attention(under("layernorm_qkv", RMS + split(GROUPED, HIDDEN, False) + EXTRA), False),
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"input_layernorm": True, "fuse_qkv_params": True, "num_gqa_groups": 2},
        attention(under("layernorm_qkv", NORM + affine(HIDDEN + 2 * KV, HIDDEN) + EXTRA)),
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"attention_type": "cross", "input_layernorm": True},
        CROSS,
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"attention_type": "cross"},
        attention(
            under("query_layer", affine(HIDDEN, HIDDEN) + EXTRA)
            + under("key_value", split(KEYS, HIDDEN) + EXTRA)
        ),
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"attention_type": "cross", "fuse_qkv_params": True},
        attention(
            under("query_layer", affine(HIDDEN, HIDDEN) + EXTRA)
            + under("key_value", affine(2 * HIDDEN, HIDDEN) + EXTRA)
        ),
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"fuse_qkv_params": True, "qk_norm_type": "LayerNorm"},
        FUSED + [(f"{x}_norm.{kind}", (HEAD,)) for x in ("q", "k") for kind in ("weight", "bias")],
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm"},
        [*FUSED, ("q_norm.weight", (HEAD,)), ("k_norm.weight", (HEAD,))],
    ),
    (
        te.MultiheadAttention,
        (HIDDEN, HEADS),
        {"fuse_qkv_params": True, "qk_norm_type": "L2Normalization"},
        FUSED,
    ),
    (
        te.TransformerLayer,
        (HIDDEN, FFN, HEADS),
        {},
        under("self_attention", SELF) + under("layernorm_mlp", mlp()),
    ),
    (
        te.TransformerLayer,
        (HIDDEN, FFN, HEADS),
        {"layer_type": "decoder"},
        under("self_attention", SELF)
        + under("inter_attention", CROSS)
        + under("layernorm_mlp", mlp()),
    ),
    (
        te.TransformerLayer,
        (HIDDEN, FFN, HEADS),
        {"output_layernorm": True, "fuse_qkv_params": True},
        under("self_attention", FUSED)
        + under("layernorm_mlp", mlp())
        + [("layernorm.weight", (HIDDEN,)), ("layernorm.bias", (HIDDEN,))],
    ),
    (
        te.TransformerLayer,
        (HIDDEN, FFN, HEADS),
        {"parallel_attention_mlp": True, "activation": "swiglu", "bias": False},
        under(
            "self_attention",
            attention(under("layernorm_qkv", NORM + split(QKV, HIDDEN, False) + EXTRA), False),
        )
        + under("layernorm_mlp", mlp(first=2 * FFN, bias=False)),
    ),
]


def name_of(row: Any) -> str:
    kind, _, options, _ = row
    return "-".join([kind.__name__, *(f"{k}={v}" for k, v in options.items())])


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_keys_shapes_and_order(row: Any) -> None:
    kind, sizes, options, expected = row
    if kind is not te.DotProductAttention:
        options = {**options, "device": "cpu"}
    module = kind(*sizes, **options)
    state = module.state_dict()
    assert [(key, tuple(value.shape)) for key, value in state.items()] == expected
    assert {v.dtype for k, v in state.items() if k.endswith("_extra_state")} <= {torch.uint8}


def in_fp8(module: nn.Module, device: str, recipe: Any = None) -> torch.Tensor:
    x = torch.ones(16, 32, device=device)
    with te.fp8_autocast(fp8_recipe=recipe):
        out = module(x)
    out.sum().backward()
    return out


def test_only_delayed_scaling_has_state(device: str) -> None:
    layer = te.LayerNormMLP(32, 64, device=device)
    in_fp8(layer, device, Float8CurrentScaling())
    assert layer.state_dict()["_extra_state"].numel() == 0
    in_fp8(layer, device)
    state = layer.state_dict()["_extra_state"]
    # The magic word, three sizes, and each scale with 1024 amaxes. Each of the two GEMMs has three
    # scales in the forward and two in the backward.
    assert state.numel() == 8 + 12 + 4 * 1025 * (6 + 4)
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    size = state.numel()
    in_fp8(layer, device)
    assert layer.state_dict()["_extra_state"].numel() == size  # the size stays the same


PLAIN = [
    (lambda: nn.Linear(32, 48), lambda d: te.Linear(32, 48, device=d)),
    (lambda: nn.Linear(32, 48, bias=False), lambda d: te.Linear(32, 48, bias=False, device=d)),
    (lambda: nn.LayerNorm(32), lambda d: te.LayerNorm(32, device=d)),
    (lambda: nn.RMSNorm(32, eps=1e-5), lambda d: te.RMSNorm(32, device=d)),
]


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(("plain", "ours"), PLAIN, ids=["linear", "no_bias", "norm", "rms"])
def test_plain_layers_load_into_ours_and_back(
    plain: Any, ours: Any, used: bool, device: str
) -> None:
    """With strict=True, also after calls in FP8. The way back drops the FP8 state."""
    torch.manual_seed(0)
    source = plain().to(device)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.uniform_(0.5, 1.5)
    target = ours(device)
    if used:
        in_fp8(target, device)
    has_scales = bool(getattr(target, "scaling", None))
    said = pytest.warns(UserWarning, match="scales stay") if has_scales else nullcontext()
    with said:
        assert target.load_state_dict(source.state_dict(), strict=True) == ([], [])
    x = torch.randn(16, 32, device=device)
    assert (target(x) - source(x)).abs().max() < 2e-2  # TF32 on a GPU
    back = plain().to(device)
    state = {k: v for k, v in target.state_dict().items() if not k.endswith("_extra_state")}
    assert back.load_state_dict(state, strict=True) == ([], [])
    for key, value in source.state_dict().items():
        assert torch.equal(back.state_dict()[key], value)


def plain_block() -> nn.Module:
    """The norm and the linear layers of an MLP block, in plain torch."""
    block = nn.Module()
    block.norm = nn.LayerNorm(32)
    block.up, block.down = nn.Linear(32, 64), nn.Linear(64, 32)
    return block


def test_plain_weights_become_a_fused_module(device: str) -> None:
    """It is enough to rename the keys."""
    block = plain_block().to(device)
    fused = te.LayerNormMLP(32, 64, device=device)
    names = {"norm": "layer_norm_", "up": "fc1_", "down": "fc2_"}
    state = {}
    for key, value in block.state_dict().items():
        layer, kind = key.split(".")
        state[names[layer] + kind] = value
    assert fused.load_state_dict(state, strict=True) == ([], [])
    x = torch.randn(16, 32, device=device)
    hidden = nn.functional.gelu(block.up(block.norm(x)), approximate="tanh")
    assert (fused(x) - block.down(hidden)).abs().max() < 2e-2


class _Tripwire:
    """Sets `opened` when it is unpickled."""

    opened = False

    def __reduce__(self) -> Any:
        return (setattr, (_Tripwire, "opened", True))


def pickled() -> torch.Tensor:
    import pickle  # noqa: PLC0415 - what older versions wrote

    return torch.frombuffer(bytearray(pickle.dumps(_Tripwire())), dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:.*ignoring the _extra_state of another package:UserWarning")
@pytest.mark.parametrize(
    "foreign", [None, torch.empty(0, dtype=torch.uint8), io.BytesIO(b"PK"), pickled()]
)
@pytest.mark.parametrize("kind", ["Linear", "LayerNorm", "RMSNorm", "LayerNormMLP"])
def test_state_of_other_versions_loads_without_running_code(kind: str, foreign: Any) -> None:
    """Newer versions write an empty state for norms too; the oldest wrote a BytesIO."""
    sizes = {"Linear": (32, 48), "LayerNormMLP": (32, 64)}.get(kind, (32,))
    source = getattr(te, kind)(*sizes, device="cpu")
    target = getattr(te, kind)(*sizes, device="cpu")
    state = {**source.state_dict(), "_extra_state": foreign}
    assert target.load_state_dict(state, strict=True) == ([], [])
    for key, parameter in source.named_parameters():
        assert torch.equal(target.get_parameter(key), parameter)
    assert not _Tripwire.opened


def test_safetensors_round_trip(device: str, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    source, target = (te.TransformerLayer(32, 64, 4, device=device) for _ in range(2))
    x = torch.randn(16, 2, 32, device=device)
    with te.fp8_autocast():
        source.eval()(x).sum().backward()
    safetensors.save_file(source.state_dict(), tmp_path / "layer.safetensors")
    state = safetensors.load_file(tmp_path / "layer.safetensors", device=device)
    assert target.load_state_dict(state, strict=True) == ([], [])
    with torch.no_grad(), te.fp8_autocast():
        assert torch.equal(target.eval()(x), source(x))


def test_torch_load_with_weights_only(device: str, tmp_path: Any) -> None:
    source, target = (te.LayerNormLinear(32, 48, device=device) for _ in range(2))
    in_fp8(source, device)
    torch.save(source.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert target.load_state_dict(state, strict=True) == ([], [])
    assert torch.equal(target.get_extra_state(), source.get_extra_state())
