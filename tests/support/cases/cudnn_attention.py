"""Calls that test the cuDNN backend of attention: formats, masks, windows, heads, extras."""

from dataclasses import dataclass

import torch
from cases import names

LONGEST = 96
# Pairs of real queries and real keys of each sequence, for padding mask types.
SELF = ((70, 70), (96, 96), (1, 1))
CROSS = ((40, 96), (96, 33), (0, 5), (7, 0))


@dataclass(frozen=True)
class Case:
    mask_type: str = "no_mask"
    qkv_format: str = "bshd"
    dtype: torch.dtype = torch.bfloat16
    queries: int = LONGEST
    keys: int = LONGEST
    heads: int = 4
    groups: int = 4
    size: int = 64
    value_size: int = 64
    window: tuple[int, int] | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    room: int = 0  # padding tokens between sequences of thd
    bias: tuple[int, int] = ()
    bias_type: str = "no_bias"
    sink: bool = False
    packed: str = ""  # "whole" or "heads": query, key and value are views of one tensor

    def __str__(self):
        return names.of_case(self)

    @property
    def batch(self):
        return len(self.lengths) or 2


CASES = [
    Case(),
    Case("causal", "sbhd"),
    Case("causal", dtype=torch.float16),
    Case("causal", groups=2, packed="whole"),
    Case("causal", "sbhd", groups=1, size=128, value_size=128, packed="whole"),
    Case("causal", size=192, value_size=128),
    Case("causal", size=256, value_size=256, heads=2, groups=2),
    Case("no_mask", "sbhd", size=40, value_size=72, queries=77, keys=133),
    Case("causal", queries=40),
    Case("causal_bottom_right", queries=40),
    Case("causal_bottom_right", queries=33, keys=95, window=(20, 0)),
    Case("causal", window=(17, 0)),
    Case("no_mask", window=(10, 5)),
    Case("no_mask", window=(10, 10), queries=40),
    Case("no_mask", "sbhd", window=(10, -1)),
    Case("no_mask", window=(-1, 10)),
    Case("padding", lengths=SELF),
    Case("padding", "sbhd", lengths=CROSS, groups=2),
    Case("padding_causal", lengths=SELF, size=128, value_size=128),
    Case("padding_causal_bottom_right", lengths=CROSS),
    Case("padding", lengths=CROSS, window=(12, 12)),
    Case("padding_causal", "sbhd", lengths=CROSS, window=(12, 0)),
    Case("padding", "thd", lengths=SELF, packed="whole"),
    Case("padding_causal", "thd", lengths=SELF, packed="heads"),
    Case("padding_causal", "thd", lengths=SELF, room=8, size=128, value_size=128, packed="heads"),
    Case("padding_causal", "thd", lengths=SELF, groups=1, room=8, packed="whole"),
    Case("padding", lengths=SELF, packed="heads"),
    Case("padding_causal", "sbhd", lengths=SELF, groups=2, packed="whole"),
    Case("padding_causal", "thd", lengths=SELF, groups=2),
    Case("padding_causal", "thd", lengths=SELF, room=16, size=128, value_size=128),
    Case("padding", "thd", lengths=CROSS, room=8),
    Case("padding_causal_bottom_right", "thd", lengths=CROSS, groups=1),
    Case("padding", "thd", lengths=CROSS, window=(12, 12)),
    Case("padding_causal", "thd", lengths=((5, 5),) * 9, size=128, value_size=64),
    Case("no_mask", bias=(1, 4), bias_type="post_scale_bias"),
    Case("causal", "sbhd", bias=(1, 4), bias_type="post_scale_bias"),
    Case("causal", bias_type="alibi"),
    Case("causal", bias_type="alibi", heads=6, groups=6, queries=40),
    Case("causal", sink=True),
    Case("no_mask", sink=True, groups=2),
]
