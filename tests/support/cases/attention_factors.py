"""Values of each property of an attention case, and cases that are picked by hand."""

import torch
from cases.attention_matrix import HEADS, Case

from transformer_engine.pytorch.attention.masks.masks import MASK_TYPES

FACTORS = {
    "mask_type": [*MASK_TYPES],
    "qkv_format": ["sbhd", "bshd", "thd"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "groups": [HEADS, 2, 1],
    "bias": ["no_bias", "pre_scale_bias", "post_scale_bias", "alibi", "slopes"],
    "window": [None, (2, 0), (2, 1), (1, -1)],
    "dropout": [0.0, 0.25],
    "lengths": [(7, 7), (5, 9), (9, 5)],
    "sizes": [(16, 16), (24, 16), (16, 40)],
    "bias_shape": [(3, HEADS), (1, HEADS), (1, 1)],
    "by_lengths": [False, True],
    "room": [False, True],
}
CROSS = {"queries": 5, "keys": 9}
HAND_PICKED = [
    Case(),
    Case("causal", size=256, value_size=256, dtype=torch.bfloat16),
    Case("causal"),
    Case("causal", dtype=torch.bfloat16, qkv_format="bshd"),
    Case("causal", dtype=torch.float16, groups=2),
    Case("no_mask", **CROSS, groups=1),
    Case("no_mask", **CROSS, value_size=8, qkv_format="bshd"),
    Case("causal", **CROSS, qkv_format="bshd"),
    Case("causal", queries=9, keys=5),
    Case("causal_bottom_right", **CROSS),
    Case("causal_bottom_right", queries=9, keys=5, dtype=torch.bfloat16),  # some queries see no key
    Case("no_mask", window=(2, 1)),
    Case("no_mask", **CROSS, window=(1, -1), groups=2),
    Case("causal", window=(2, 0), dtype=torch.bfloat16),
    Case("padding"),
    Case("padding", **CROSS, qkv_format="bshd", dtype=torch.bfloat16),
    Case("padding", **CROSS, window=(2, 2)),
    Case("padding_causal", qkv_format="bshd", groups=2),
    Case("padding,causal", dtype=torch.float16),
    Case("padding_causal_bottom_right", **CROSS, window=(3, 0)),
    Case("arbitrary"),
    Case("arbitrary", **CROSS, qkv_format="bshd", groups=2, value_size=24, dtype=torch.bfloat16),
    Case("arbitrary", window=(2, 2)),
    Case("padding", qkv_format="thd"),
    Case("padding_causal", qkv_format="thd", groups=2, dtype=torch.bfloat16),
    Case("padding_causal_bottom_right", **CROSS, qkv_format="thd", value_size=8),
    Case("padding", **CROSS, qkv_format="thd", window=(1, 1)),
    Case("no_mask", bias="post_scale_bias"),
    Case("causal", bias="pre_scale_bias", bias_shape=(1, HEADS), groups=2),
    Case("padding", bias="post_scale_bias", bias_shape=(3, 1), dtype=torch.bfloat16),
    Case("arbitrary", bias="post_scale_bias", bias_shape=(1, 1), qkv_format="bshd"),
    Case("causal", bias="alibi"),
    Case("no_mask", **CROSS, bias="alibi", qkv_format="bshd", dtype=torch.bfloat16),
    Case("padding", **CROSS, bias="alibi"),
    Case("padding_causal", bias="alibi", qkv_format="thd"),
]
