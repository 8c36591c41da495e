"""Common mistakes of users: errors say operation, expected, got and layer."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

X = torch.ones(4, 2, 32)
Q = torch.ones(8, 2, 16)


class HandingOn(te.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def linear(**arguments):
    return te.Linear(32, 48, device="cpu", name="decoder.fc", **arguments)


def attention(**arguments):
    return te.DotProductAttention(2, 16, name="decoder.attention", **arguments)


def packed(ends):
    thd = attention(qkv_format="thd", attn_mask_type="padding")
    return thd(Q, Q, Q, cu_seqlens_q=ends, cu_seqlens_kv=ends)


def decoder():
    return te.TransformerLayer(32, 64, 2, layer_type="decoder", device="cpu", name="decoder")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def with_main_grad(main_grad):
    layer = linear(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = main_grad
    layer(X)


FORWARDS = {
    "a list for a tensor": (
        lambda: linear()([1.0]),
        TypeError,
        "[Linear] expected inp to be a torch.Tensor, got list (layer decoder.fc)",
    ),
    "a norm of integers": (
        lambda: te.LayerNorm(32, device="cpu", name="norm")(X.long()),
        TypeError,
        "[LayerNorm] expected inp of float32, float16 or bfloat16, got torch.int64 (layer norm)",
    ),
    "a norm of nothing": (
        lambda: te.RMSNorm(32, device="cpu", name="norm")(None),
        TypeError,
        "[RMSNorm] expected inp to be a torch.Tensor, got NoneType (layer norm)",
    ),
    "another device": (
        lambda: linear()(X.to("meta")),
        ValueError,
        "[Linear] expected inp on cpu, where weight is, got meta (layer decoder.fc)",
    ),
    "a norm on another device": (
        lambda: te.LayerNorm(32, device="meta", name="norm")(X),
        ValueError,
        "[LayerNorm] expected inp on meta, where weight is, got cpu (layer norm)",
    ),
    "a layer of nothing": (
        lambda: te.TransformerLayer(32, 64, 2, device="cpu", name="layer")(None),
        TypeError,
        "[TransformerLayer] expected hidden_states to be a torch.Tensor, got NoneType"
        " (layer layer)",
    ),
    "main_grad transposed": (
        lambda: with_main_grad(torch.zeros(32, 48)),
        ValueError,
        "[wgrad] expected weight.main_grad of shape (48, 32), got (32, 48) (layer decoder.fc)",
    ),
    "main_grad of less precision": (
        lambda: with_main_grad(torch.zeros(48, 32, dtype=torch.bfloat16)),
        TypeError,
        "[wgrad] expected weight.main_grad of torch.float32 or of the dtype of activations,"
        " torch.float32, got torch.bfloat16 (layer decoder.fc)",
    ),
    "rows that are no ints": (
        lambda: te.GroupedLinear(2, 32, 32, device="cpu", name="moe")(X, [4.0, 4.0]),
        TypeError,
        "[GroupedLinear] expected m_splits to be ints, got [4.0, 4.0] (layer moe)",
    ),
    "attention without a query": (
        lambda: attention()(None, Q, Q),
        TypeError,
        "[DotProductAttention] expected query_layer to be a torch.Tensor, got NoneType"
        " (layer decoder.attention)",
    ),
    "attention without cu_seqlens": (
        lambda: packed(None),
        ValueError,
        "[attention] expected cu_seqlens_q for qkv_format 'thd', got None"
        " (layer decoder.attention)",
    ),
    "cu_seqlens as a list": (
        lambda: packed([0, 4, 8]),
        TypeError,
        "[attention] expected cu_seqlens_q to be a torch.Tensor, got list"
        " (layer decoder.attention)",
    ),
    "cu_seqlens behind the tokens": (
        lambda: packed(int32(0, 4, 12)),
        ValueError,
        "[attention] expected cu_seqlens_q to rise from 0 to at most 8 (the tokens), got [0, 4, 12]"
        " (layer decoder.attention)",
    ),
    "cu_seqlens that fall": (
        lambda: packed(int32(0, 6, 4, 8)),
        ValueError,
        "[attention] expected cu_seqlens_q to rise from 0 to at most 8 (the tokens), got"
        " [0, 6, 4, 8] (layer decoder.attention)",
    ),
    "hidden states on another device": (
        lambda: te.TransformerLayer(32, 64, 2, device="cpu", name="layer")(X.to("meta")),
        ValueError,
        "[TransformerLayer] expected hidden_states on cpu, where the parameters are, got meta"
        " (layer layer)",
    ),
    "hidden states of another dtype": (
        lambda: te.MultiheadAttention(32, 2, device="cpu", name="mha")(X.half()),
        TypeError,
        "[MultiheadAttention] Data types for parameters must match when outside of torch.autocast:"
        " expected hidden_states of torch.float32, the parameters' dtype, got torch.float16"
        " (layer mha)",
    ),
    "an encoder's output of another dtype": (
        lambda: decoder()(X, encoder_output=X.half()),
        TypeError,
        "[TransformerLayer] Data types for parameters must match when outside of torch.autocast:"
        " expected encoder_output of torch.float32, the parameters' dtype, got torch.float16"
        " (layer decoder)",
    ),
    "a decoder without an encoder's output": (
        lambda: decoder()(X),
        ValueError,
        "[TransformerLayer] expected encoder_output, as layer_type is 'decoder', got None"
        " (layer decoder)",
    ),
    "hidden states that are integers": (
        lambda: te.TransformerLayer(32, 64, 2, device="cpu", name="layer")(X.long()),
        TypeError,
        "[TransformerLayer] expected hidden_states of float32, float16 or bfloat16, got"
        " torch.int64 (layer layer)",
    ),
    "hidden states without a batch": (
        lambda: te.TransformerLayer(32, 64, 2, device="cpu", name="layer")(X[0]),
        ValueError,
        "[TransformerLayer] expected hidden_states of shape (sequence, batch, 32), got"
        " (2, 32) (layer layer)",
    ),
    "hidden states of another size": (
        lambda: te.MultiheadAttention(16, 2, device="cpu", name="mha")(X),
        ValueError,
        "[MultiheadAttention] expected hidden_states of shape (sequence, batch, 16), got"
        " (4, 2, 32) (layer mha)",
    ),
    "an encoder's output as a list": (
        lambda: te.MultiheadAttention(32, 2, attention_type="cross", device="cpu", name="mha")(
            X, encoder_output=[1.0]
        ),
        TypeError,
        "[MultiheadAttention] expected encoder_output to be a torch.Tensor, got list (layer mha)",
    ),
}

CONSTRUCTORS = {
    "a size that is no int": (
        lambda: te.TransformerLayer(64, 64 * 8 / 3, 4, device="cpu"),
        TypeError,
        "[TransformerLayer] expected ffn_hidden_size to be an int, got 170.66666666666666 (layer ",
    ),
    "a negative size": (
        lambda: te.Linear(-1, 32, device="cpu"),
        ValueError,
        "[Linear] expected in_features >= 1, got -1 (layer ",
    ),
    "no features": (
        lambda: te.LayerNormLinear(0, 32, device="cpu"),
        ValueError,
        "[LayerNormLinear] expected in_features >= 1, got 0 (layer ",
    ),
    "a norm of nothing": (
        lambda: te.RMSNorm(0, device="cpu"),
        ValueError,
        "[RMSNorm] expected hidden_size >= 1, got 0 (layer RMSNorm)",
    ),
    "an MLP of nothing": (
        lambda: te.LayerNormMLP(32, 0, device="cpu"),
        ValueError,
        "[LayerNormMLP] expected ffn_hidden_size >= 1, got 0 (layer ",
    ),
    "a layer of nothing": (
        lambda: te.TransformerLayer(32, 0, 2, device="cpu"),
        ValueError,
        "[TransformerLayer] expected ffn_hidden_size >= 1, got 0 (layer ",
    ),
    "double precision": (
        lambda: te.LayerNorm(32, params_dtype=torch.float64, device="cpu"),
        TypeError,
        "[LayerNorm] expected params_dtype float32, float16 or bfloat16 (fp8_model_init makes FP8"
        " weights), got torch.float64",
    ),
    "FP8 as the dtype of parameters": (
        lambda: linear(params_dtype=torch.float8_e4m3fn),
        TypeError,
        "[Linear] expected params_dtype float32, float16 or bfloat16 (fp8_model_init makes FP8"
        " weights), got torch.float8_e4m3fn",
    ),
    "a misspelt keyword": (
        lambda: te.TransformerLayer(64, 64, 4, hidden_droput=0.0),
        TypeError,
        "TransformerLayer() got unexpected keyword argument(s) hidden_droput (did you mean"
        " hidden_dropout?)",
    ),
    "a misspelt keyword of a subclass": (
        lambda: HandingOn(16, 16, biass=False),
        TypeError,
        "HandingOn() got unexpected keyword argument(s) biass (did you mean bias?)",
    ),
    "too many positional arguments": (
        lambda: te.Linear(16, 32, True, None),
        TypeError,
        "[Linear] expected at most 3 positional arguments (in_features, out_features, bias), got 4:"
        " give the others by name",
    ),
    "a misspelt keyword of attention": (
        lambda: te.DotProductAttention(2, 16, softmax_scal=1.0, foo=1),
        TypeError,
        "DotProductAttention() got unexpected keyword argument(s) foo, softmax_scal (did you mean"
        " softmax_scale?)",
    ),
    "an argument given twice": (
        lambda: te.Linear(16, 32, in_features=16),
        TypeError,
        "[Linear] multiple values for argument 'in_features'",
    ),
    "what a newer version can": (
        lambda: te.TransformerLayer(32, 64, 4, delay_wgrad_compute=True),
        NotImplementedError,
        "[TransformerLayer] expected delay_wgrad_compute=False, the only value that is implemented,"
        " got True",
    ),
    "a norm without parameters": (
        lambda: te.LayerNorm(32, elementwise_affine=False),
        NotImplementedError,
        "[LayerNorm] elementwise_affine=False is not implemented: take torch.nn.LayerNorm",
    ),
    "a misspelt keyword of a norm": (
        lambda: te.RMSNorm(32, epsilon=1e-6),
        TypeError,
        "RMSNorm() got unexpected keyword argument(s) epsilon",
    ),
    "a window of one number": (
        lambda: attention(window_size=4),
        TypeError,
        "[attention] expected window_size (left, right) of integers, got 4",
    ),
    "a recipe as a flag": (
        lambda: te.fp8_autocast(True, DelayedScaling()),
        TypeError,
        "[fp8_autocast] expected calibrating to be True or False, got DelayedScaling(",
    ),
    "the class of a recipe": (
        lambda: te.autocast(recipe=DelayedScaling),
        ValueError,
        "[fp8_autocast] expected recipe to be DelayedScaling, Float8CurrentScaling,"
        " Float8BlockScaling or CustomRecipe, got the class DelayedScaling; did you mean"
        " DelayedScaling()?",
    ),
    "a recipe under two names": (
        lambda: te.fp8_autocast(fp8_recipe=DelayedScaling(), recipe=DelayedScaling()),
        ValueError,
        "[fp8_autocast] expected one of fp8_recipe and recipe, got both",
    ),
    "a margin that is no int": (
        lambda: DelayedScaling(margin=0.5),
        ValueError,
        "[DelayedScaling] expected margin to be an int within +-126, got 0.5",
    ),
    "a recipe by name for FP8 weights": (
        lambda: te.fp8_model_init(True, "delayed"),
        ValueError,
        "[quantized_model_init] expected recipe to be DelayedScaling, Float8CurrentScaling,"
        " Float8BlockScaling or CustomRecipe, got 'delayed'",
    ),
}


@pytest.mark.parametrize("mistake", FORWARDS)
def test_forwards_say_what_is_wrong(mistake):
    call, kind, text = FORWARDS[mistake]
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call()


@pytest.mark.parametrize("mistake", CONSTRUCTORS)
def test_constructors_say_what_is_wrong(mistake):
    call, kind, text = CONSTRUCTORS[mistake]
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"got cuda, and torch sees no GPU; without device="):
        te.Linear(32, 48, device="cuda")


def test_keywords_of_newer_versions_may_say_what_is_so():
    mlp = te.LayerNormMLP(32, 64, delay_wgrad_compute=False, device="cpu")
    assert mlp(X).shape == X.shape
    te.get_cpu_offload_context(manual_synchronization=False, retain_pinned_cpu_buffers=True)


def test_norms_take_the_keywords_of_torch():
    norm = te.LayerNorm(32, elementwise_affine=True, bias=True, sm_margin=4, device="cpu")
    assert norm(X).shape == X.shape


def test_fp8_autocast_knows_the_newer_names():
    recipe = DelayedScaling(amax_history_len=3)
    layer = linear()
    with te.fp8_autocast(recipe=recipe, amax_reduction_group=None):
        layer(X).sum().backward()
    assert layer.scaling["forward"].amax_history.shape[0] == 3


SPARSE = X.to_sparse()
DENSE_ONLY = {
    "Linear": lambda: (linear(), "inp", "decoder.fc"),
    "LayerNormLinear": lambda: (te.LayerNormLinear(32, 32, device="cpu", name="a"), "inp", "a"),
    "LayerNormMLP": lambda: (te.LayerNormMLP(32, 32, device="cpu", name="a"), "inp", "a"),
    "LayerNorm": lambda: (te.LayerNorm(32, device="cpu", name="a"), "inp", "a"),
    "RMSNorm": lambda: (te.RMSNorm(32, device="cpu", name="a"), "inp", "a"),
    "TransformerLayer": lambda: (
        te.TransformerLayer(32, 32, 2, device="cpu", name="a"),
        "hidden_states",
        "a",
    ),
}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("kind", DENSE_ONLY)
def test_inputs_are_dense(kind, enabled):
    """Also after a call with a dense input of the same shape and dtype."""
    module, parameter, layer = DENSE_ONLY[kind]()
    text = (
        f"[{kind}] expected {parameter} to be a dense torch.Tensor, got one of layout "
        f"torch.sparse_coo (layer {layer})"
    )
    with te.fp8_autocast(enabled=enabled):
        for _ in range(2):
            with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
                module(SPARSE)
            module(X)


def test_inputs_are_no_dtensors():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(X, init_device_mesh("cpu", (1,)))
        for kind, make in DENSE_ONLY.items():
            module, parameter, layer = make()
            expected = f"[{kind}] expected {parameter} to be a plain torch.Tensor, got a DTensor: "
            text = re.escape(f"{expected}call its to_local() (layer {layer})")
            with pytest.raises(TypeError, match=f"^{text}$"):
                module(x)
    finally:
        dist.destroy_process_group()


def test_other_inputs_are_dense():
    grouped = te.GroupedLinear(2, 32, 32, device="cpu", name="moe")
    with pytest.raises(TypeError, match=r"one of layout torch.sparse_coo \(layer moe\)"):
        grouped(torch.ones(4, 32).to_sparse(), [2, 2])
    with pytest.raises(TypeError, match=r"expected key_layer to be a dense .*decoder.attention"):
        attention()(Q[None], Q[None].to_sparse(), Q[None])
    for operation in (te.ops.GELU(), te.ops.SwiGLU(), te.ops.Bias(32, device="cpu")):
        with pytest.raises(TypeError, match=r"^.\w+. expected x to be a dense torch.Tensor"):
            operation(SPARSE)
    with pytest.raises(TypeError, match=r"^.Fp8Padding. expected inp to be a dense torch.Tensor"):
        te.Fp8Padding(2)(torch.ones(4, 32).to_sparse(), [2, 2])
