"""What the attention benchmarks compare: each of our backends, and direct calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from contenders import random
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import BACKENDS
from transformer_engine.pytorch.attention.core.projections import HeadLayout, split_qkv

Call = Callable[[], Any]
BY_NAME = {backend.name: backend for backend in BACKENDS}


@dataclass(frozen=True)
class Case:
    """A problem; if `padded` is "lengths" or "thd", half of the tokens are padding."""

    batch: int
    heads: int
    groups: int
    sequence: int
    size: int
    mask: str
    window: tuple[int, int] | None = None
    padded: str = ""

    def __str__(self) -> str:
        grouped = "" if self.groups == self.heads else f" kv{self.groups}"
        kind = {"no_mask": "full", "padding": "full", "padding_causal": "causal"}
        window = f" window {self.window[0]}" if self.window else ""
        padded = f" half padding, {self.padded}" if self.padded else ""
        mask = kind.get(self.mask, self.mask)
        where = f"b{self.batch} h{self.heads}{grouped} s{self.sequence} d{self.size}"
        return f"{where} {mask}{window}{padded}"

    @property
    def causal(self) -> bool:
        """Whether a query attends only to keys up to its own position."""
        return "causal" in self.mask

    def whole(self) -> Case:
        """The same problem without padding and window, as the reference."""
        return replace(self, mask="causal" if self.causal else "no_mask", padded="", window=None)


@contextmanager
def only(name: str | None) -> Iterator[None]:
    """Make our attention run this backend; None leaves the choice to it."""
    choose = core.choose
    if name is not None:
        core.choose = lambda *call: BY_NAME[name]
    try:
        yield
    finally:
        core.choose = choose


def takers(case: Case) -> list[str]:
    """Names of the backends that support a case, the preferred one first."""
    table = te.attention_backends(
        num_attention_heads=case.heads,
        kv_channels=case.size,
        num_gqa_groups=case.groups,
        qkv_format="thd" if case.padded == "thd" else "bshd",
        attn_mask_type=case.mask,
        window_size=case.window,
        max_seqlen_q=case.sequence,
        max_seqlen_kv=case.sequence,
        batch_size=None if case.padded == "thd" else case.batch,
        device="cuda",
    )
    return [name for name, reason in table.items() if reason is None]


def ours(case: Case, qkv_format: str = "bshd", backend: str | None = None) -> tuple[Call, Call]:
    """Our forward, and forward + backward; query, key and value are parts of one tensor."""
    arguments: dict[str, Any] = {}
    lengths = [case.sequence] * case.batch
    if case.padded:
        lengths = [case.sequence * (2 * i + 1) // (2 * case.batch) for i in range(case.batch)]
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        arguments = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, **longest}
    if case.padded == "thd":
        qkv_format, lead = "thd", [sum(lengths)]
    elif qkv_format == "sbhd":
        lead = [case.sequence, case.batch]
    else:
        lead = [case.batch, case.sequence]
    layout = HeadLayout(case.heads, case.groups, case.size, False)
    projection = random(*lead, (case.heads + 2 * case.groups) * case.size)
    inputs = [part.detach().requires_grad_() for part in split_qkv(projection, layout)]
    module = te.DotProductAttention(
        case.heads,
        case.size,
        case.groups,
        qkv_format=qkv_format,
        attn_mask_type=case.mask,
        window_size=case.window,
    )

    def forward() -> torch.Tensor:
        with only(backend):
            return module(*inputs, **arguments)

    upstream = random(*lead, case.heads * case.size)
    return forward, lambda: torch.autograd.grad(forward(), inputs, upstream)


def _inputs(case: Case, heads_first: bool) -> list[torch.Tensor]:
    shapes = [(case.batch, case.sequence, n, case.size) for n in (case.heads, *[case.groups] * 2)]
    if heads_first:
        shapes = [(b, n, s, d) for b, s, n, d in shapes]
    return [random(*shape).requires_grad_() for shape in shapes]


def _with_backward(forward: Call, inputs: list[torch.Tensor]) -> tuple[Call, Call]:
    upstream = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), inputs, upstream)


def torch_sdpa(case: Case, backend: SDPBackend) -> tuple[Call, Call]:
    """The calls of torch's attention on contiguous `[batch, heads, sequence, size]`."""
    inputs = _inputs(case, heads_first=True)
    grouped = {} if case.groups == case.heads else {"enable_gqa": True}

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*inputs, is_causal=case.causal, **grouped)

    return _with_backward(forward, inputs)


def flash_attn_4(case: Case) -> tuple[Call, Call]:
    """The calls of flash-attn 4 on contiguous `[batch, sequence, heads, size]`."""
    attend = import_module("flash_attn.cute").flash_attn_func
    inputs = _inputs(case, heads_first=False)
    return _with_backward(lambda: attend(*inputs, causal=case.causal)[0], inputs)


def libraries(case: Case) -> dict[str, tuple[Call, Call]]:
    """The calls of the libraries that are installed."""
    peers = {
        "torch cuDNN": torch_sdpa(case, SDPBackend.CUDNN_ATTENTION),
        "torch flash": torch_sdpa(case, SDPBackend.FLASH_ATTENTION),
    }
    if has_flash_attn_4():
        peers["flash-attn 4"] = flash_attn_4(case)
    return peers


def has_flash_attn_4() -> bool:
    """Whether flash-attn 4 can be imported."""
    try:
        import_module("flash_attn.cute")
    except ImportError:
        return False
    return True
