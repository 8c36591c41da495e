"""MultiheadAttention and TransformerLayer from their definition: float64, batch first.

Parameters are a dict from names in the state dict to float64 tensors.
"""

from dataclasses import dataclass

import attention_reference
import torch
from torch.nn.functional import gelu, relu, silu

EPS = 1e-5
ACTIVATIONS = {
    "gelu": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "swiglu": lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "squared_relu": lambda x: relu(x) ** 2,
}


@dataclass(frozen=True)
class Heads:
    heads: int
    groups: int
    size: int
    interleaved: bool = False


@dataclass(frozen=True)
class Norm:
    kind: str = "LayerNorm"
    zero_centered: bool = False


def parameters_of(module):
    """Returns float64 copies of a module's parameters, by name, which require gradients."""
    return {
        name: parameter.detach().cpu().double().requires_grad_()
        for name, parameter in module.named_parameters()
    }


def below(parameters, prefix):
    """Returns the parameters of a child, by their names in the child."""
    start = f"{prefix}."
    return {k.removeprefix(start): v for k, v in parameters.items() if k.startswith(start)}


def norm(x, weight, bias, how):
    if how.kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    y = y * (weight + 1 if how.zero_centered else weight)
    return y if bias is None else y + bias


def linear(x, parameters):
    """Applies a Linear; split parameters are concatenated in the order of registration."""
    weights = [v for k, v in parameters.items() if k.endswith("weight") and "norm" not in k]
    biases = [v for k, v in parameters.items() if k.endswith("bias") and "norm" not in k]
    y = x @ torch.cat(weights).T
    return y + torch.cat(biases) if biases else y


def norm_linear(x, parameters, how):
    normed = norm(x, parameters["layer_norm_weight"], parameters.get("layer_norm_bias"), how)
    return linear(normed, parameters), normed


def query_key_value(projection, heads):
    """Splits a projection's output into query, key and value `[batch, sequence, heads, size]`."""
    per_group = heads.heads // heads.groups
    queries, keys, values = [], [], []
    rows = projection.split(heads.size, dim=-1)  # one block of `size` features each
    if heads.interleaved:
        for g in range(heads.groups):
            group = rows[g * (per_group + 2) : (g + 1) * (per_group + 2)]
            queries += group[:per_group]
            keys.append(group[per_group])
            values.append(group[per_group + 1])
    else:
        queries = rows[: heads.heads]
        keys = rows[heads.heads : heads.heads + heads.groups]
        values = rows[heads.heads + heads.groups :]
    return [torch.stack(list(part), dim=-2) for part in (queries, keys, values)]


def key_value(projection, heads):
    rows = projection.split(heads.size, dim=-1)
    if heads.interleaved:
        return torch.stack(rows[::2], -2), torch.stack(rows[1::2], -2)
    return torch.stack(rows[: heads.groups], -2), torch.stack(rows[heads.groups :], -2)


def rotated(x, angles):
    """Applies rotary position embedding by `[sequence, size]` angles; `x` is batch first."""
    first, second = x.chunk(2, -1)
    angles = angles.double()[:, None]
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def multi_head(parameters, x, seen, heads, how, encoder_output=None, angles=None, post_bias=None):
    """Returns the output, and the output of the input norm (None without one)."""
    normed = None
    if encoder_output is None:
        if "layernorm_qkv.layer_norm_weight" in parameters:
            projection, normed = norm_linear(x, below(parameters, "layernorm_qkv"), how)
        else:
            projection = linear(x, below(parameters, "qkv"))
        query, key, value = query_key_value(projection, heads)
    else:
        if "layernorm_query.layer_norm_weight" in parameters:
            query, normed = norm_linear(x, below(parameters, "layernorm_query"), how)
        else:
            query = linear(x, below(parameters, "query_layer"))
        query = query.view(*query.shape[:-1], heads.heads, heads.size)
        key, value = key_value(linear(encoder_output, below(parameters, "key_value")), heads)
    if angles is not None:
        query, key = rotated(query, angles), rotated(key, angles)
    context = attention_reference.attention(query, key, value, seen, post_bias=post_bias)
    return linear(context.flatten(2), below(parameters, "proj")), normed


def mlp(parameters, x, how, activation):
    normed = norm(x, parameters["layer_norm_weight"], parameters.get("layer_norm_bias"), how)
    hidden = linear(normed, {k: v for k, v in parameters.items() if k.startswith("fc1")})
    hidden = ACTIVATIONS[activation](hidden)
    return linear(hidden, {k: v for k, v in parameters.items() if k.startswith("fc2")}), normed


@dataclass(frozen=True)
class Layer:
    heads: Heads
    how: Norm
    activation: str = "gelu"
    post_norm_residual: bool = False
    parallel: bool = False


def transformer_layer(
    parameters, x, layer, seen, encoder_output=None, cross_seen=None, angles=None, post_bias=None
):
    """Returns the output of the layer. There is no dropout."""
    how, heads = layer.how, layer.heads
    attention, normed = multi_head(
        below(parameters, "self_attention"), x, seen, heads, how, None, angles, post_bias
    )
    if layer.parallel:
        return x + attention + mlp(below(parameters, "layernorm_mlp"), x, how, layer.activation)[0]
    x = attention + (normed if layer.post_norm_residual else x)
    if encoder_output is not None:
        cross, normed = multi_head(
            below(parameters, "inter_attention"), x, cross_seen, heads, how, encoder_output
        )
        x = cross + (normed if layer.post_norm_residual else x)
    out, normed = mlp(below(parameters, "layernorm_mlp"), x, how, layer.activation)
    x = out + (normed if layer.post_norm_residual else x)
    final = below(parameters, "layernorm")
    return norm(x, final["weight"], final.get("bias"), how) if final else x


# Bounds of relative errors in the norm. GPUs multiply fp32 in TF32, which has 11 bits: a GEMM has
# an error of a few 2^-12, and a layer adds the errors of a few GEMMs.
FP32_BOUND = {"cpu": 5e-5, "cuda": 5e-3}
BF16_BOUND = 4e-2


def bound_of(dtype, device):
    """The largest relative error of a layer's output; gradients may have twice that."""
    return FP32_BOUND[device] if dtype is torch.float32 else BF16_BOUND


def assert_near(actual, expected, device):
    """Asserts equality up to the order of sums; in TF32 that order changes how operands round."""
    assert relative_error(actual, expected) < FP32_BOUND[device] / 10


def relative_error(actual, expected):
    actual, expected = (t.detach().cpu().double() for t in (actual, expected))
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_same_gradients(module, parameters, bound):
    """Asserts that gradients of all parameters agree, relative to their norms.

    Some gradients are zero by definition (a bias of keys changes no softmax). What is left of them
    is the rounding error of large sums, so they are compared with the largest gradient of their
    shape.
    """
    norms: dict[torch.Size, float] = {}
    for expected in (parameter.grad for parameter in parameters.values()):
        norms[expected.shape] = max(norms.get(expected.shape, 0.0), float(expected.norm()))
    for name, parameter in module.named_parameters():
        expected = parameters[name].grad
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype, name
        if float(expected.norm()) < 1e-9:
            scale = max(1.0, norms[expected.shape])
            assert float(parameter.grad.norm()) < bound * scale, name
        else:
            assert relative_error(parameter.grad, expected) < bound, name
