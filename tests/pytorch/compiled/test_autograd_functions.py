"""Gradients of our autograd functions in compiled code; Dynamo of torch 2.11 lost some of them."""

from collections.abc import Callable, Sequence

import pytest
import torch

import transformer_engine.pytorch as te

ENDS = torch.tensor([0, 5, 10], dtype=torch.int32)
EXPERTS = torch.tensor([[0, 2], [3, 1], [2, 3], [1, 0]], dtype=torch.int32)
Call = Callable[..., torch.Tensor]


def attention(mask: str) -> Call:
    module = te.DotProductAttention(
        4, 16, qkv_format="thd", attn_mask_type=mask, attention_dropout=0.0
    )
    return lambda *qkv: module(
        *qkv,
        cu_seqlens_q=ENDS.to(qkv[0].device),
        cu_seqlens_kv=ENDS.to(qkv[0].device),
        max_seqlen_q=5,
        max_seqlen_kv=5,
    )


def permuted(x: torch.Tensor) -> torch.Tensor:
    rows, order = te.moe_permute(x, EXPERTS.to(x.device), map_type="index")
    return te.moe_unpermute(rows.square(), order, map_type="index")


CALLS: dict[str, tuple[Call, Sequence[int], int]] = {
    "packed padding": (attention("padding"), (10, 4, 16), 3),
    "packed causal": (attention("padding_causal"), (10, 4, 16), 3),
    "permuted tokens": (permuted, (4, 16), 1),
    "cross entropy": (
        lambda x: te.parallel_cross_entropy(x, torch.zeros_like(x[..., 0]).long(), 0.1),
        (4, 2, 16),
        1,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    if name.startswith("packed") and device == "cuda" and dtype is torch.bfloat16:
        pytest.skip("gradients of cuDNN and flash-attn need not repeat bit for bit")
    call, shape, count = CALLS[name]
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]
    found = []
    torch._dynamo.reset()
    for run in (call, torch.compile(call, backend="aot_eager")):
        own = [x.clone().requires_grad_() for x in values]
        y = run(*own)
        weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=dtype, device=device).view(y.shape)
        found.append([y.detach(), *torch.autograd.grad((y * weights).sum(), own)])
    eager, compiled = found
    assert all(bool(grad.any()) for grad in eager[1:])
    torch.testing.assert_close(compiled, eager)
