"""ALiBi: a bias `-slope[h] * |i + keys - queries - j|` on the score of query i and key j."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.module.inputs import check_tensors


def default_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Slope of each head, fp32 `[1, heads, 1, 1]`.

    Let n be the largest power of two with n <= heads. The first n heads have the slopes
    `2^(-8k/n)`, k = 1..n. The other heads have `2^(-4(2k-1)/n)`, k = 1, 2, ..., which lie between
    those of the first heads.
    """
    n = 1 << (heads.bit_length() - 1)
    first = torch.arange(1, n + 1, dtype=torch.float32, device=device) * (-8.0 / n)
    between = (torch.arange(heads - n, dtype=torch.float32, device=device) * 2 + 1) * (-4.0 / n)
    return torch.exp2(torch.cat((first, between))).view(1, heads, 1, 1)


def check_slopes(slopes: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """Bring slopes `[heads]` or `[batch, heads]`, fp32, to `[1 or batch, heads, 1, 1]`."""
    check_tensors("attention", alibi_slopes=slopes)
    if slopes.dtype is not torch.float32:
        raise TypeError(f"[attention] expected alibi_slopes of torch.float32, got {slopes.dtype}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"[attention] expected alibi_slopes of shape {(heads,)} or {(batch, heads)},"
            f" got {tuple(slopes.shape)}"
        )
    return slopes.reshape(-1, heads, 1, 1)


def alibi_bias(
    slopes: torch.Tensor, queries: int, keys: int, shift: torch.Tensor | int
) -> torch.Tensor:
    """The bias in fp32, `[1 or batch, heads, queries, keys]`.

    `slopes` are fp32 `[1 or batch, heads, 1, 1]`; `shift` is real keys minus real queries, one
    number or `[batch, 1, 1, 1]`.
    """
    query = torch.arange(queries, device=slopes.device)[:, None]
    key = torch.arange(keys, device=slopes.device)
    return -slopes * (query + shift - key).abs()
