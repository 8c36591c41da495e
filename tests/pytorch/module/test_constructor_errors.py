"""Constructors refuse invalid arguments, and modules refuse bytes after their FP8 state."""

import re

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling
from transformer_engine.pytorch.fp8.extra_state import pack

CPU = {"device": "cpu", "name": "fc"}
# Constructor, its sizes, and further arguments. The error may come from a child.
SIZES = {
    "Linear": (te.Linear, {"in_features": 32, "out_features": 32, "tp_size": 1}, CPU),
    "LayerNormLinear": (te.LayerNormLinear, {"in_features": 32, "out_features": 32}, CPU),
    "LayerNormMLP": (te.LayerNormMLP, {"hidden_size": 32, "ffn_hidden_size": 32}, CPU),
    "GroupedLinear": (
        te.GroupedLinear,
        {"num_gemms": 2, "in_features": 32, "out_features": 32},
        CPU,
    ),
    "LayerNorm": (te.LayerNorm, {"hidden_size": 32}, CPU),
    "RMSNorm": (te.RMSNorm, {"hidden_size": 32}, CPU),
    "DotProductAttention": (
        te.DotProductAttention,
        {"num_attention_heads": 2, "kv_channels": 16, "num_gqa_groups": 2},
        {"name": "fc"},
    ),
    "MultiheadAttention": (
        te.MultiheadAttention,
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "kv_channels": 16,
            "num_gqa_groups": 2,
            "layer_number": 1,
        },
        CPU,
    ),
    "TransformerLayer": (
        te.TransformerLayer,
        {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "kv_channels": 16},
        CPU,
    ),
    "Fp8Padding": (te.Fp8Padding, {"num_gemms": 2, "align_size": 16}, {}),
    "RotaryPositionEmbedding": (te.RotaryPositionEmbedding, {"dim": 16}, {}),
    "InferenceParams": (te.InferenceParams, {"max_batch_size": 2, "max_sequence_length": 8}, {}),
    "Bias": (te.ops.Bias, {"size": 16}, {}),
}
EVERY_SIZE = [(kind, size) for kind, (_, sizes, _) in SIZES.items() for size in sizes]


@pytest.mark.parametrize(("kind", "size"), EVERY_SIZE)
def test_sizes_are_ints(kind, size):
    make, sizes, others = SIZES[kind]
    make(**sizes, **others)
    for wrong in (str(sizes[size]), float(sizes[size]), True):
        where = r" \(layer fc" if "name" in others else "$"
        text = rf"^\[\w+\] expected {size} to be an int, got {re.escape(repr(wrong))}{where}"
        with pytest.raises(TypeError, match=text):
            make(**{**sizes, size: wrong}, **others)
    with pytest.raises(ValueError, match=rf"^\[\w+\] expected {size} >= [01], got -1"):
        make(**{**sizes, size: -1}, **others)


def test_sizes_of_numpy_and_lists_of_one_are_sizes():
    size = pytest.importorskip("numpy").int64(32)
    assert te.Linear(size, size, device="cpu").weight.shape == (32, 32)
    assert te.LayerNorm([32], device="cpu").weight.shape == (32,)


RATES = {
    "eps": lambda x: te.LayerNormLinear(32, 32, eps=x, **CPU),
    "layernorm eps": lambda x: te.RMSNorm(32, eps=x, **CPU),
    "hidden_dropout": lambda x: te.TransformerLayer(32, 32, 2, hidden_dropout=x, **CPU),
    "attention_dropout": lambda x: te.DotProductAttention(2, 16, attention_dropout=x, name="fc"),
    "softmax_scale": lambda x: te.DotProductAttention(2, 16, softmax_scale=x, name="fc"),
}


@pytest.mark.parametrize("rate", RATES)
def test_rates_are_numbers(rate):
    text = rf"expected {rate.split()[-1]} to be a number, got '0.1' \(layer fc\)"
    with pytest.raises(TypeError, match=text):
        RATES[rate]("0.1")


EPS = {
    "LayerNorm": te.LayerNorm,
    "RMSNorm": te.RMSNorm,
    "L2Normalization": lambda size, eps: te.ops.L2Normalization(eps=eps),
    "LayerNormLinear": lambda size, eps: te.LayerNormLinear(size, size, eps=eps, device="cpu"),
    "LayerNormMLP": lambda size, eps: te.LayerNormMLP(size, size, eps=eps, device="cpu"),
}


@pytest.mark.parametrize("kind", EPS)
def test_eps_is_not_negative(kind):
    module = EPS[kind](32, eps=0.0)
    for wrong in (-1e-5, float("nan")):
        text = rf"^\[{kind}\] expected eps of 0 or more, got {wrong}"
        with pytest.raises(ValueError, match=text):
            EPS[kind](32, eps=wrong)
        with pytest.raises(ValueError, match=text):
            module.eps = wrong
        assert module.eps == 0.0


def test_initialisers_are_functions():
    text = r"^\[Linear\] expected a function that initialises weight, got 'normal' \(layer fc\)$"
    with pytest.raises(TypeError, match=text):
        te.Linear(32, 32, init_method="normal", **CPU)


NAMED = [te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.LayerNorm]


@pytest.mark.parametrize("kind", [*NAMED, te.DotProductAttention])
def test_names_are_strings(kind):
    sizes = [32] * (1 if kind is te.LayerNorm else 2)
    text = rf"^\[{kind.__name__}\] expected name to be a str or None, got 5$"
    with pytest.raises(TypeError, match=text):
        kind(*sizes, name=5)


@pytest.mark.parametrize("kind", NAMED)
def test_devices_are_those_of_torch(kind):
    sizes = [32] * (1 if kind is te.LayerNorm else 2)
    text = r"^\[{}\] expected device to be a torch.device or .*, got {} \(layer fc\)$"
    with pytest.raises(ValueError, match=text.format(kind.__name__, "'gpu'")):
        kind(*sizes, device="gpu", name="fc")
    with pytest.raises(TypeError, match=text.format(kind.__name__, r"\[\]")):
        kind(*sizes, device=[], name="fc")


@pytest.mark.parametrize("kind", [te.Linear, te.DotProductAttention])
def test_trackers_come_from_functions(kind):
    tracker = te.CudaRNGStatesTracker(device="cpu")
    text = (
        rf"^\[{kind.__name__}\] expected get_rng_state_tracker to be a function that returns a"
        r" tracker, got a CudaRNGStatesTracker; did you mean lambda: tracker\? \(layer fc\)$"
    )
    with pytest.raises(TypeError, match=text):
        kind(32, 32, get_rng_state_tracker=tracker, name="fc")


def test_functions_return_trackers():
    text = "expected get_rng_state_tracker to return a tracker, with fork, got a int"
    with pytest.raises(TypeError, match=rf"^\[weight\] {text}$"):
        te.Linear(32, 32, get_rng_state_tracker=lambda: 3, **CPU)
    attention = te.DotProductAttention(
        2, 16, attention_dropout=0.5, get_rng_state_tracker=lambda: 3, name="fc"
    )
    with pytest.raises(TypeError, match=rf"^\[attention\] {text} \(layer fc\)$"):
        attention(*torch.ones(3, 4, 1, 2, 16))
    attention.eval()(*torch.ones(3, 4, 1, 2, 16))


GROUPS = {
    "amax_reduction_group": lambda x: te.autocast(amax_reduction_group=x),
    "fp8_group": lambda x: te.fp8_autocast(fp8_group=x),
    "graphs": lambda x: te.make_graphed_callables(
        torch.nn.Identity(), (torch.ones(1),), fp8_enabled=True, fp8_group=x
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_amax_groups_are_groups(group):
    text = (
        r"^\[fp8_autocast\] expected amax_reduction_group \(fp8_group\) to be a process group of "
        r"torch.distributed or None, got 'data'$"
    )
    with pytest.raises(TypeError, match=text):
        GROUPS[group]("data")


@pytest.mark.filterwarnings("ignore:.make_graphed_callables. CUDA graphs need samples")
@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_torch_are_taken(group):
    GROUPS[group](torch.distributed.ProcessGroup(0, 1))
    GROUPS[group](torch.distributed.GroupMember.NON_GROUP_MEMBER)


def test_parallel_groups_are_groups():
    text = r"^\[Linear\] expected tp_group to be a process group .* got 3 \(layer fc\)$"
    with pytest.raises(TypeError, match=text):
        te.Linear(32, 32, tp_group=3, **CPU)
    text = r"^\[DotProductAttention\] expected cp_global_ranks .* got 0 \(layer fc\)$"
    with pytest.raises(TypeError, match=text):
        te.DotProductAttention(2, 16, cp_global_ranks=0, name="fc")
    attention = te.DotProductAttention(2, 16, name="fc")
    with pytest.raises(TypeError, match=r"expected cp_group to be a process group"):
        attention.set_context_parallel_group(["ranks"], None, None)


def state_of(layer):
    with te.fp8_autocast(enabled=True):
        layer(torch.randn(16, 32)).sum().backward()
    return layer.state_dict()


def with_more(state, more):
    return {**state, "_extra_state": torch.cat([state["_extra_state"], more])}


@pytest.mark.parametrize(
    "more", [torch.zeros(8), torch.zeros(16), torch.full((24,), 63), torch.full((800,), 63)]
)
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormMLP])
def test_bytes_behind_the_fp8_state_are_refused(kind, more):
    layer = kind(32, 32, **CPU)
    state = with_more(state_of(layer), more.to(torch.uint8))
    text = (
        r"expected _extra_state to end with its amax history, or with scales of \d FP8 weight"
        rf"\(s\), got {more.numel()} more bytes that are no such scales: .* \(layer fc\)$"
    )
    with pytest.raises(RuntimeError, match=text):
        layer.load_state_dict(state)


def test_bytes_behind_the_fp8_state_of_fp8_weights_are_refused():
    with te.fp8_model_init():
        layer = te.Linear(32, 32, **CPU)
    state = with_more(state_of(layer), torch.full((24,), 63, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"got 32 more bytes that are no such scales"):
        layer.load_state_dict(state)


def test_attention_has_no_weights_whose_scales_could_follow():
    attention = te.DotProductAttention(2, 16, name="fc")
    state = pack({}, [torch.ones(2)])
    with pytest.raises(
        ValueError, match=r"scales of 0 FP8 weight\(s\), got 8 more bytes .*\(layer fc\)"
    ):
        attention.set_extra_state(state)


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormMLP])
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8BlockScaling])
def test_scales_of_fp8_weights_load_into_plain_ones(kind, recipe):
    with te.fp8_model_init(recipe=recipe()):
        source = kind(160, 48, **CPU)
    target = kind(160, 48, **CPU)
    state = source.state_dict()
    assert state["_extra_state"].numel() > 0
    target.load_state_dict(state)
