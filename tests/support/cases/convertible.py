"""PyTorch models for the tests of `te.convert`."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT whose head shares its weight with the embedding."""

    def __init__(self, vocabulary, width, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encoder_layer():
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)


def norm_linear():
    return nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 32)
    )


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """One layer of every kind that `te.convert` must keep, and four that it may replace."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.shared_a = self.shared_b = nn.Linear(32, 32)
        self.odd = nn.Linear(32, 10)
        self.subclass = Scaled(32, 32)
        self.patched = nn.Linear(32, 32)
        self.patched.forward = lambda x: x
        self.embedding = nn.Embedding(64, 32)
        self.tied = nn.Linear(32, 64)
        self.tied.weight = self.embedding.weight
        self.hooked = nn.Linear(32, 32)
        self.hooked.register_forward_pre_hook(lambda module, args: None)
        self.parametrized = parametrizations.weight_norm(nn.Linear(32, 32))
        self.old_weight_norm = nn.utils.spectral_norm(nn.Linear(32, 32))
        self.more = nn.Linear(32, 32)
        self.more.register_buffer("mask", torch.ones(32))
        self.double = nn.Linear(32, 32).double()
        self.no_affine = nn.LayerNorm(32, elementwise_affine=False)
        self.no_bias = nn.LayerNorm(32, bias=False)
        self.half_eps = nn.RMSNorm(32).bfloat16()
        self.attention = nn.MultiheadAttention(32, 2)
        self.clash = nn.Linear(32, 32)
        self.clash.chain = "mine"
        self.lazy = nn.LazyLinear(32)
        self.flat = nn.Linear(32, 32)
        self.flat.weight = nn.Parameter(torch.zeros(0))
