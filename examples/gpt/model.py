"""A GPT over bytes, made of transformer_engine's modules."""

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
    """The model that the settings ask for, with weights drawn from torch's generator."""
    return (Gpt if settings.model == "te" else TorchGpt)(settings)


def initial_weights(settings: Settings) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """GPT-2's rule: what adds to the residual stream starts smaller, the more layers add to it."""
    residual_std = 0.02 / math.sqrt(2 * settings.layers)
    return {
        "init_method": partial(nn.init.normal_, std=0.02),
        "output_layer_init_method": partial(nn.init.normal_, std=residual_std),
    }


class Gpt(nn.Module):
    """Byte embedding, causal transformer layers, and a head behind the last norm.

    Under `te.fp8_autocast` every GEMM of the layers and of the head runs in FP8 (256 outputs suit
    it too). What stays in higher precision is no GEMM of a weight: the embedding is a lookup;
    scores and weighted sums of attention run inside the attention kernel; norms, residuals and
    the loss are elementwise. The head does not share the embedding's weight: with 256 bytes
    there is nothing to save.
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

        With a cache, `tokens` go on where it ends.
        """
        kind = tokens.device.type
        hidden = self.embedding(tokens)
        if torch.is_autocast_enabled(kind):  # the residual stream has the layers' dtype
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        for layer in self.layers:
            hidden = layer(hidden, rotary_pos_emb=self.angles, inference_params=cache)
        return self.head(hidden)

    def cache_for(self, texts: int) -> te.InferenceParams:
        """A cache of so many texts, each as long as a window of the training."""
        return te.InferenceParams(texts, self.window)
