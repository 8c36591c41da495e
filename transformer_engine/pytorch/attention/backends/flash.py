"""What the backends of the flash-attn project share, whichever version is installed.

The versions are packages of their own, found by the name of their distribution when this module is
imported; the package itself is imported at its first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from transformer_engine.pytorch.attention.backends.backend import (
    GPU,
    HIGH_PRECISION,
    SOMETHING,
    Problem,
    Requirement,
)
from transformer_engine.pytorch.attention.backends.dense import Attend
from transformer_engine.pytorch.attention.backends.varlen import Side, varlen
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.environment import environment, repeatable


@dataclass
class Package:
    """A version of flash-attn.

    Attributes:
        distribution: what pip calls it.
        module: what to import, with `flash_attn_func` and `flash_attn_varlen_func`.
        version: installed; None where it is not.
    """

    distribution: str
    module: str
    version: TorchVersion | None


def package(distribution: str, module: str) -> Package:
    """Look for a version of flash-attn, without importing it."""
    try:
        found: TorchVersion | None = TorchVersion(version(distribution))
    except PackageNotFoundError:
        found = None
    return Package(distribution, module, found)


class Options(NamedTuple):
    """Keyword arguments that all versions have, in each version's terms.

    Attributes:
        softmax_scale: factor on the scores.
        causal: the band ends at the diagonal and has no other end.
        window_size: `(left, right)`, -1 is no limit; the diagonal ends bottom-right.
        deterministic: gradients must repeat bit for bit.
    """

    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    deterministic: bool


def options(call: Call) -> Options:
    """What a call says in flash-attn's terms; `aligned` makes sure that it can."""
    limits = call.shape.rule if call.shape.band is None else call.shape.band
    left, right = limits.left, limits.right
    causal = (left, right) == (-1, 0)
    window = (-1, -1) if causal else (left, right)
    return Options(call.scale, causal, window, repeatable(environment()))


class Kernels:
    """A version's `attend`.

    Args:
        source: the package to import at the first call.
    """

    def __init__(self, source: Package) -> None:
        self.source = source
        self._module: Any = None
        self._attend_packed: Attend = varlen(self._packed)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """See `backends/__init__.py`."""
        if call.shape.rule.type.padding:
            return self._attend_packed(query, key, value, call)
        keywords = self.keywords(options(call), call, query.device)
        batch_second = call.shape.qkv_format == "sbhd"
        out = self.attend_whole((query, key, value), keywords, batch_second)
        return (out.transpose(0, 1) if batch_second else out).flatten(2)

    def attend_whole(
        self, inputs: tuple[torch.Tensor, ...], keywords: dict[str, Any], batch_second: bool
    ) -> torch.Tensor:
        """Attend to whole sequences, sbhd or bshd.

        Args:
            inputs: queries, keys and values in the format of the call.
            keywords: what `keywords` returns.
            batch_second: the format is sbhd.

        Returns:
            `[batch, sequence, heads, size]`.
        """
        tensors = batch_first(batch_second, *inputs)
        return only_result(self.module.flash_attn_func(*tensors, **keywords))

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        of_query: Side,
        of_key: Side,
        call: Call,
    ) -> torch.Tensor:
        return only_result(
            self.module.flash_attn_varlen_func(
                query,
                key,
                value,
                cu_seqlens_q=of_query.cu_seqlens,
                cu_seqlens_k=of_key.cu_seqlens,
                max_seqlen_q=of_query.longest,
                max_seqlen_k=of_key.longest,
                **self.keywords(options(call), call, query.device),
            )
        )

    @property
    def module(self) -> Any:
        """The package, imported when first needed."""
        if self._module is None:
            self._module = import_module(self.source.module)
        return self._module

    def keywords(self, said: Options, call: Call, device: torch.device) -> dict[str, Any]:
        """Arguments of the version's functions; a version that has more adds them."""
        return said._asdict()


def batch_first(batch_second: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views `[batch, sequence, ...]` of tensors that may have their batch second."""
    return tuple([x.transpose(0, 1) for x in tensors]) if batch_second else tensors


def only_result(out: Any) -> torch.Tensor:
    """The result without the statistics that some versions return beside it."""
    result: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
    return result


def aligned(problem: Problem) -> bool:
    """The mask's band ends bottom-right, or there is none, or both corners are the same."""
    if problem.rule.left < 0 and problem.rule.right < 0:
        return True
    return problem.rule.bottom_right or problem.alike


def requirements(source: Package, oldest: str) -> tuple[Requirement, ...]:
    """What every version requires."""
    name = source.distribution
    return (
        Requirement(
            lambda problem, allowed: allowed.flash,
            "switched off by NVTE_FLASH_ATTN=0",
        ),
        GPU,
        Requirement(
            lambda problem, allowed: source.version is not None,
            f"{name} is not installed; python -m pip install {name}",
        ),
        Requirement(
            lambda problem, allowed: source.version is None or source.version >= oldest,
            f"the installed {name} is older than {oldest}; python -m pip install -U {name}",
        ),
        Requirement(
            lambda problem, allowed: problem.dtype in (torch.float16, torch.bfloat16),
            "computes in float16 and bfloat16 only",
        ),
        HIGH_PRECISION,
        Requirement(
            lambda problem, allowed: not problem.rule.type.arbitrary,
            "takes no mask of one's own; use another attn_mask_type than 'arbitrary'",
        ),
        Requirement(
            lambda problem, allowed: aligned(problem),
            "its diagonal ends bottom-right; use a bottom_right mask type, or queries and keys of"
            " the same lengths (cu_seqlens_q and cu_seqlens_kv the same tensor)",
        ),
        Requirement(
            lambda problem, allowed: (
                not problem.padded_by_mask
                or (not problem.windowed and (problem.alike or not problem.rule.type.causal))
            ),
            "takes windows, and causal masks of keys with padding of their own, with lengths only;"
            " give cu_seqlens_q and cu_seqlens_kv instead of attention_mask",
        ),
        SOMETHING,
    )
