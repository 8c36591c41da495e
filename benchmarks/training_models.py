"""The language models of bench_training, in plain torch and with our layers; they return a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from contenders import DEVICE, DTYPE, FACTORY, PlainLayer, Size
from torch import nn

import transformer_engine.pytorch as te

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DEVIATION = 0.02  # standard deviation of initial weights


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model: a GPT or, with `groups` of keys and values, a Llama-like model.

    A GPT has learned positions, LayerNorm, GELU, biases, and a shared weight for embedding and
    head. A Llama-like model has rotary positions, RMSNorm, SwiGLU, no biases, and an own head.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    sequence: int
    groups: int | None = None
    vocabulary: int = 50304

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def flops_of_a_token(self) -> float:
        """FLOPs of a training step per token, without recompute, and with causal attention as half.

        Each weight of a GEMM counts six per token: two in the forward, four in the backward. In the
        forward, scores and their products with values each count 2 * hidden for each of
        sequence / 2 keys; forward and backward together count three times that.
        """
        queries_keys_values = self.hidden + 2 * self.head_size * (self.groups or self.heads)
        matrices = 2 if self.groups is None else 3
        layer = self.hidden * (queries_keys_values + self.hidden + matrices * self.ffn)
        weights = self.layers * layer + self.vocabulary * self.hidden
        return 6.0 * weights + 6.0 * self.layers * self.hidden * self.sequence


ARCHITECTURES = {
    "125m": Architecture("GPT 125M", 12, 768, 3072, 12, 1024),
    "350m": Architecture("GPT 350M", 24, 1024, 4096, 16, 2048),
    "1.3b": Architecture("Llama 1.3B", 24, 2048, 5504, 16, 4096, groups=4),
}
TINY = {
    "125m": Architecture("GPT", 2, 64, 128, 4, 32, vocabulary=256),
    "1.3b": Architecture("Llama", 2, 64, 128, 4, 32, groups=2, vocabulary=256),
}


class Model(nn.Module):
    """Embeddings, layers, norm, head and cross entropy.

    Args:
        sizes: the sizes of the model.
        layers: the layers, which are called with the hidden states and `each`.
        norm: the norm after the last layer.
        loss: function of hidden states, head weight and targets that returns the mean loss.
        each: further keyword arguments of every layer.
    """

    def __init__(
        self,
        sizes: Architecture,
        layers: list[nn.Module],
        norm: nn.Module,
        loss: Loss,
        each: dict[str, Any],
    ) -> None:
        super().__init__()
        gpt = sizes.groups is None
        self.token = nn.Embedding(sizes.vocabulary, sizes.hidden, **FACTORY)
        self.position = nn.Embedding(sizes.sequence, sizes.hidden, **FACTORY) if gpt else None
        self.layers, self.norm = nn.ModuleList(layers), norm
        weight = torch.empty(sizes.vocabulary, sizes.hidden, **FACTORY)
        self.head = self.token.weight if gpt else nn.Parameter(weight)
        self.loss, self.each = loss, each
        for parameter in (self.token.weight, self.head, *self._positions()):
            nn.init.normal_(parameter, std=DEVIATION)

    def _positions(self) -> list[nn.Parameter]:
        return [] if self.position is None else [self.position.weight]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of all `tokens` but the first, `[batch, sequence + 1]`."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, **self.each)
        return self.loss(self.norm(x), self.head, tokens[:, 1:])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The input of the first layer."""
        x: torch.Tensor = self.token(tokens)
        return x if self.position is None else x + self.position.weight


# ---- Ours ---------------------------------------------------------------------------------------


def our_model(
    sizes: Architecture, fp8_head: bool, kind: type[Model] = Model, **arguments: Any
) -> Model:
    """A model made of this package's modules; `arguments` are arguments of the layers."""
    gpt = sizes.groups is None
    style: dict[str, Any] = {}
    if not gpt:  # as in the plain model: all queries, then keys, then values
        style = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
        style["qkv_weight_interleaved"] = False
    layers: list[nn.Module] = [
        te.TransformerLayer(
            *(sizes.hidden, sizes.ffn, sizes.heads, sizes.groups),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method=partial(nn.init.normal_, std=DEVIATION),
            output_layer_init_method=partial(nn.init.normal_, std=_residual_deviation(sizes)),
            fuse_qkv_params=True,
            params_dtype=DTYPE,
            device=DEVICE,
            **{"attn_input_format": "bshd", **style, **arguments},
        )
        for _ in range(sizes.layers)
    ]
    make_norm = te.LayerNorm if gpt else te.RMSNorm
    norm = make_norm(sizes.hidden, params_dtype=DTYPE, device=DEVICE)
    each = {}
    if not gpt:
        angles = te.RotaryPositionEmbedding(sizes.head_size)(sizes.sequence)
        each["rotary_pos_emb"] = angles.to(DEVICE)
    loss = partial(te.linear_cross_entropy, fp8=fp8_head)
    return kind(sizes, layers, norm, loss, each)


def _residual_deviation(sizes: Architecture) -> float:
    """GPT-2's rule for weights whose results are added to the residual stream."""
    return DEVIATION / math.sqrt(2 * sizes.layers)


# ---- Plain torch --------------------------------------------------------------------------------


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Loss in plain torch: logits of all tokens, then cross entropy in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), target.flatten())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + size / 2) of the last axis."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class PlainLlamaLayer(nn.Module):
    """A Llama layer in plain torch: `[batch, sequence, hidden]`, pre-norm, causal."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.heads, self.groups = sizes.heads, sizes.groups or sizes.heads
        hidden, both = sizes.hidden, 2 * self.groups * sizes.head_size
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5, **FACTORY)
        self.qkv = nn.Linear(hidden, hidden + both, bias=False, **FACTORY)
        self.proj = nn.Linear(hidden, hidden, bias=False, **FACTORY)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5, **FACTORY)
        self.gate_up = nn.Linear(hidden, 2 * sizes.ffn, bias=False, **FACTORY)
        self.fc2 = nn.Linear(sizes.ffn, hidden, bias=False, **FACTORY)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads + 2 * self.groups, -1))
        parts = heads.transpose(1, 2).split((self.heads, self.groups, self.groups), dim=1)
        query, key = (rotate(part, *rotary) for part in parts[:2])
        context = F.scaled_dot_product_attention(
            *(query, key, parts[2]), is_causal=True, enable_gqa=self.groups != self.heads
        )
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


def plain_model(sizes: Architecture) -> Model:
    """A model made of torch's modules."""
    if sizes.groups is None:
        size = Size(sizes.hidden, sizes.ffn, sizes.heads, sizes.sequence, 0)
        layers: list[nn.Module] = [PlainLayer(size) for _ in range(sizes.layers)]
        norm, each = nn.LayerNorm(sizes.hidden, **FACTORY), {}
    else:
        layers = [PlainLlamaLayer(sizes) for _ in range(sizes.layers)]
        norm = nn.RMSNorm(sizes.hidden, eps=1e-5, **FACTORY)
        powers = torch.arange(0, sizes.head_size, 2, device=DEVICE) / sizes.head_size
        angles = torch.outer(torch.arange(sizes.sequence, device=DEVICE), 10000.0**-powers)
        each = {"rotary": (angles.cos(), angles.sin())}
    for name, parameter in nn.ModuleList(layers).named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("proj.weight", "fc2.weight"))
            deviation = _residual_deviation(sizes) if residual else DEVIATION
            nn.init.normal_(parameter, std=deviation)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return Model(sizes, layers, norm, plain_loss, each)
