"""The architecture of `gpt.model` in plain PyTorch, the baseline for comparisons of speed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from gpt.data import VOCABULARY
from gpt.settings import Settings

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosine and sine, `[seq, head / 2]`


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + size / 2) of the last axis by the angle of the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class TorchCache:
    """Keys and values of earlier tokens, `[2, texts, heads, window, head]` of each layer."""

    def __init__(self, layers: int, texts: int) -> None:
        self.texts, self.sequence_len_offset = texts, 0
        self.caches: list[torch.Tensor | None] = [None] * layers

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of new tokens; returns those of all tokens so far."""
        caches = self.caches[layer]
        if caches is None:
            _, heads, _, size = key.shape
            caches = self.caches[layer] = key.new_zeros(2, self.texts, heads, window, size)
        begin = self.sequence_len_offset
        end = begin + key.shape[2]
        caches[0, :, :, begin:end] = key
        caches[1, :, :, begin:end] = value
        return caches[0, :, :, :end], caches[1, :, :, :end]


class TorchLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, settings: Settings, number: int) -> None:
        super().__init__()
        hidden = settings.hidden
        self.number, self.window = number, settings.seq
        self.heads, self.dropout = settings.heads, settings.dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(
        self, x: torch.Tensor, rotary: Rotary, cache: TorchCache | None = None
    ) -> torch.Tensor:
        """Takes and returns `[batch, seq, hidden]`."""
        x = x + self._drop(self._attention(self.attention_norm(x), rotary, cache))
        up = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self._drop(self.down(up))

    def _attention(self, x: torch.Tensor, rotary: Rotary, cache: TorchCache | None) -> torch.Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = (rotate(side, *rotary).to(side.dtype) for side in (query, key))
        if cache is not None:
            key, value = cache.append(self.number, key, value, self.window)
        dropout = self.dropout if self.training else 0.0
        causal = seq > 1  # one token after cached ones attends to all of them
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal
        )
        return self.projection(mixed.transpose(1, 2).reshape(batch, seq, hidden))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class TorchGpt(nn.Module):
    """Byte embedding, causal transformer layers, norm and head."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(TorchLayer(settings, i) for i in range(settings.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY)
        size = hidden // settings.heads
        frequency = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(settings.seq), frequency)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(0.02 / math.sqrt(2 * settings.layers))
        self.to(settings.device)

    def _initialise(self, residual_std: float) -> None:
        """The rule of `gpt.model.initial_weights`."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual_std if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, cache: TorchCache | None = None) -> torch.Tensor:
        """Logits `[batch, seq, 256]` of the byte after each of `tokens`, int64 `[batch, seq]`.

        With a cache, `tokens` follow the cached tokens; if the cache is not empty, one per text.
        """
        begin, kind = 0 if cache is None else cache.sequence_len_offset, tokens.device.type
        hidden = self.embedding(tokens)
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        new = slice(begin, begin + tokens.shape[1])
        rotary = (self.cos[new], self.sin[new])
        for layer in self.layers:
            hidden = layer(hidden, rotary, cache)
        return self.head(self.norm(hidden))

    def cache_for(self, texts: int) -> TorchCache:
        """An empty cache for this number of texts."""
        return TorchCache(len(self.layers), texts)
