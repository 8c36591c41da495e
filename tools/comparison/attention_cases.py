"""Cases of DotProductAttention: masks, windows, formats, heads, biases, sinks, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison.bench import PRECISIONS, Bench, Case, Row, pairwise
from comparison.training import Arguments, Subject, train

HEADS, TABLES = 4, 3
GROUPS = {"all heads": None, "2 groups": 2, "1 group": 1}
WINDOWS = {"no window": None, "7 to the left": (7, 0), "5 and 3": (5, 3)}
FACTORS = {
    "mask": (
        "no_mask",
        "causal",
        "causal_bottom_right",
        "padding",
        "padding_causal",
        "padding_causal_bottom_right",
        "arbitrary",
    ),
    "format": ("sbhd", "bshd", "thd", "thd with gaps"),
    "bias": ("no bias", "post_scale_bias", "pre_scale_bias", "alibi", "alibi of slopes"),
    "groups": tuple(GROUPS),
    "lengths": ("32 of 32", "21 of 37", "64 of 64"),
    "window": tuple(WINDOWS),
    "softmax": ("vanilla", "off-by-one", "learnable"),
    "dropout": ("keeps", "drops"),
    "use": ("plain", "two backwards", "checkpoint of te", "checkpoint of torch, not reentrant"),
    "core": ("kept", "core again"),
    "told by": ("lengths", "lengths alone", "masks"),
    "size": ("64", "32", "20", "64 and 32"),
    "precision": tuple(PRECISIONS),
    "recipe": ("none", "fp8 attention"),
}


def padding_of(bench: Bench, lengths: list[int], longest: int) -> torch.Tensor:
    """Bool `[batch, 1, 1, longest]`, True where a sequence has ended."""
    ends = torch.tensor(lengths, device=bench.device)[:, None]
    return (torch.arange(longest, device=bench.device) >= ends)[:, None, None]


def shorter(length: int, batch: int) -> list[int]:
    """Lengths of the sequences of a batch: the first has `length`, the others are shorter."""
    return [length - (i * length) // (batch + 1) for i in range(batch)]


def makes_sense(row: Row) -> bool:
    """Whether attention accepts such a call, and every value of the row has an effect."""
    packed = "thd" in row["format"]
    padded = "padding" in row["mask"]
    if packed and not (padded and row["told by"] != "masks"):
        return False
    if row["told by"] != "lengths" and not (packed or padded):
        return False
    if "causal" in row["mask"] and row["window"] == "5 and 3":
        return False
    fp8 = row["recipe"] != "none"
    refused = fp8 and ((packed and row["bias"] != "no bias") or row["softmax"] != "vanilla")
    return not refused


class Problem:
    """The sizes of a row of the table, and the arguments of a call with these sizes."""

    def __init__(self, row: Row) -> None:
        self.row, self.batch = row, 3
        self.queries, self.keys = (int(part) for part in row["lengths"].split(" of "))
        sizes = [int(part) for part in row["size"].split(" and ")]
        self.sizes = (sizes[0], sizes[-1])
        self.groups = GROUPS[row["groups"]]
        same = self.queries == self.keys
        self.real_queries = shorter(self.queries, self.batch)
        self.real_keys = self.real_queries if same else shorter(self.keys, self.batch)

    def build(self, **more: Any) -> nn.Module:
        """The module; `device` is the device of its parameters."""
        row, device = self.row, more["device"]
        module = te.DotProductAttention(
            HEADS,
            self.sizes[0] if self.sizes[0] == self.sizes[1] else self.sizes,
            num_gqa_groups=self.groups,
            attention_dropout=0.25 if row["dropout"] == "drops" else 0.0,
            qkv_format=row["format"][:4].strip(),
            attn_mask_type=row["mask"],
            window_size=WINDOWS[row["window"]],
            softmax_type=row["softmax"],
            attention_type="self" if self.queries == self.keys else "cross",
            name="layer",
        )
        return module.to(device)

    def arguments(self, bench: Bench, dtype: torch.dtype) -> Arguments:
        """Query, key and value, and the mask and bias of the call."""
        sides = [(self.queries, HEADS, self.sizes[0])]
        sides += [(self.keys, self.groups or HEADS, size) for size in self.sizes]
        x = []
        for place, (length, heads, size) in enumerate(sides):
            shape = (length, self.batch, heads, size)
            if self.row["format"] == "bshd":
                shape = (self.batch, length, heads, size)
            if "thd" in self.row["format"]:
                real = self.real_keys if place else self.real_queries
                gaps = "gaps" in self.row["format"]
                shape = (self.batch * length if gaps else sum(real), heads, size)
            x.append(bench.tensor(*shape, dtype=dtype, grad=True))
        return tuple(x), {**self._mask(bench), **self._bias(bench, dtype)}

    def _mask(self, bench: Bench) -> dict[str, Any]:
        row = self.row
        again = {"checkpoint_core_attention": row["core"] == "core again"}
        if row["mask"] == "arbitrary":
            hidden = bench.tensor(self.batch, 1, self.queries, self.keys) > 0.8
            return {**again, "attention_mask": hidden}
        if "padding" not in row["mask"]:
            return again
        if row["told by"] == "masks":
            queries = padding_of(bench, self.real_queries, self.queries)
            keys = padding_of(bench, self.real_keys, self.keys)
            same = self.queries == self.keys
            return {**again, "attention_mask": queries if same else (queries, keys)}
        lengths = {
            "cu_seqlens_q": bench.ends(self.real_queries),
            "cu_seqlens_kv": bench.ends(self.real_keys),
        }
        if "thd" in row["format"] and row["told by"] == "lengths":
            lengths |= {"max_seqlen_q": self.queries, "max_seqlen_kv": self.keys}
        if "gaps" in row["format"]:
            for name, length in (("q", self.queries), ("kv", self.keys)):
                lengths[f"cu_seqlens_{name}_padded"] = bench.ends([length] * self.batch)
        return {**again, **lengths}

    def _bias(self, bench: Bench, dtype: torch.dtype) -> dict[str, Any]:
        kind = self.row["bias"]
        if "alibi" in kind:
            slopes = bench.tensor(HEADS).abs() if "slopes" in kind else None
            return {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
        if kind == "no bias":
            return {}
        bias = bench.tensor(1, HEADS, self.queries, self.keys, dtype=dtype, grad=True)
        return {"core_attention_bias_type": kind, "core_attention_bias": bias}


def cases() -> Iterator[Case]:
    """The cases of this file."""
    for row in pairwise(FACTORS, makes_sense, TABLES):

        def run(bench: Bench, row: Row = row) -> None:
            problem = Problem(row)
            subject = Subject(problem.build, problem.arguments)
            train(bench, subject, row["precision"], row["recipe"], row["use"])

        yield Case("/".join(("DotProductAttention", *row.values())), run)
