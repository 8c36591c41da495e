"""What the tests of DotProductAttention share: backends to force, a small module, its inputs."""

import torch

from transformer_engine.pytorch.attention import DotProductAttention

# Environment variables that leave the unfused backend alone, or any other: on CPUs that is sdpa.
BACKENDS = {
    "sdpa": {"NVTE_UNFUSED_ATTN": "0"},
    "unfused": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"},
}


def cu_seqlens(lengths, device):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).to(device)


def module(**changes):
    return DotProductAttention(**{"num_attention_heads": 4, "kv_channels": 8, **changes})


def qkv(device="cpu", dtype=torch.float32, shape=(5, 2, 4, 8), grad=True):
    return [torch.randn(shape).to(device, dtype).requires_grad_(grad) for _ in range(3)]
