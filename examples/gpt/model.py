"""A GPT whose tokens are bytes, made of transformer_engine's modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import transformer_engine.pytorch as te
from gpt.data import VOCABULARY
from gpt.settings import Settings
from gpt.torch_model import TorchGpt


def build_model(settings: Settings) -> nn.Module:
    """The model of the settings, with initial weights from torch's random generator."""
    return (Gpt if settings.model == "te" else TorchGpt)(settings)


def initial_weights(settings: Settings) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """GPT-2's rule: weights whose result is added to the residual stream have std 0.02/sqrt(2L)."""
    residual_std = 0.02 / math.sqrt(2 * settings.layers)
    return {
        "init_method": partial(nn.init.normal_, std=0.02),
        "output_layer_init_method": partial(nn.init.normal_, std=residual_std),
    }


class Gpt(nn.Module):
    """Byte embedding, causal transformer layers, a last norm, and a head.

    Under `te.fp8_autocast`, every GEMM of the layers and of the head runs in FP8 (256 outputs are a
    multiple of 16, as FP8 requires). The other operations are not GEMMs with a weight and stay in
    higher precision: the lookup of embeddings, the scores and weighted sums inside the attention
    kernel, norms, residuals and the loss. The head does not share the weight of the embedding: with
    a vocabulary of 256, that would save little.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.window = settings.seq
        hidden, device = settings.hidden, settings.device
        self.embedding = nn.Embedding(VOCABULARY, hidden, device=device)
        nn.init.normal_(self.embedding.weight, std=0.02)
        angles = te.RotaryPositionEmbedding(hidden // settings.heads)(settings.seq)
        self.register_buffer("angles", angles.to(device), persistent=False)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                hidden,
                4 * hidden,
                settings.heads,
                layer_number=i + 1,
                hidden_dropout=settings.dropout,
                attention_dropout=settings.dropout,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
                fuse_qkv_params=True,  # one GEMM for query, key and value
                qkv_weight_interleaved=False,
                device=device,
                name=f"layer{i + 1}",
                **initial_weights(settings),
            )
            for i in range(settings.layers)
        )
        self.head = te.LayerNormLinear(
            hidden,
            VOCABULARY,
            init_method=partial(nn.init.normal_, std=0.02),
            device=device,
            name="head",
        )

    def forward(
        self, tokens: torch.Tensor, cache: te.InferenceParams | None = None
    ) -> torch.Tensor:
        """Logits `[batch, seq, 256]` of the byte after each of `tokens`, int64 `[batch, seq]`.

        With a cache, `tokens` follow the tokens that are in the cache.
        """
        kind = tokens.device.type
        hidden = self.embedding(tokens)
        if torch.is_autocast_enabled(kind):  # the residual stream has the layers' dtype
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        for layer in self.layers:
            hidden = layer(hidden, rotary_pos_emb=self.angles, inference_params=cache)
        return self.head(hidden)

    def cache_for(self, texts: int) -> te.InferenceParams:
        """A cache for this number of texts, each up to the length of a training window."""
        return te.InferenceParams(texts, self.window)
