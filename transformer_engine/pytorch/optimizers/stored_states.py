"""Adam's states in fewer bits than fp32: what is stored, and which fp32 value it stands for.

    float32    the value
    bfloat16   the value, rounded
    float16    the value, divided by a scale of its tensor, rounded
    uint8      likewise, as codes of FP8 E4M3
    int16      the low 16 bits of a master weight, whose high bits are the bf16 parameter

A bf16 parameter is the master weight, rounded to nearest. If the low bits are 0x8000 or more, which
is negative as int16, the master weight was rounded up: then the bits of the parameter are one more
than the high bits of the master weight. The master weight of a NaN is the parameter alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from transformer_engine.pytorch.parallel.dtensors import is_dtensor
from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES

STATES = ("exp_avg", "exp_avg_sq", "master_param")
_MASTER = STATES[2]
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2.0, torch.uint8: 448.0}
_OF_MASTERS = (torch.float32, torch.float16)
_OF_MOMENTS = (*_OF_MASTERS, torch.bfloat16, torch.uint8)


def check_name(name: object) -> None:
    """Raise ValueError unless this is the name of a state."""
    if name not in STATES:
        raise ValueError(f"[FusedAdam] expected state_name in {STATES}, got {name!r}")


class StoredStates:
    """The states of an optimizer as they are stored.

    Args:
        dtypes: dtype of each state, by name.
        remainders: keep only the low bits of master weights of bf16 parameters.

    Attributes:
        narrow: the states that have fewer bits than fp32.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], remainders: bool) -> None:
        self.dtypes, self.remainders = dict(dtypes), remainders
        self.narrow = [n for n in STATES if dtypes[n] is not torch.float32]
        self.narrow += [_MASTER] * remainders
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def check(self, capturable: bool) -> None:
        """Check the dtypes.

        Raises:
            ValueError: dtypes that states cannot have.
            NotImplementedError: dtypes with a scale for each tensor, with `capturable`.
        """
        for name, dtype in self.dtypes.items():
            known = _OF_MASTERS if name == _MASTER else _OF_MOMENTS
            if dtype not in known:
                argument = "master_weight_dtype" if name == _MASTER else f"{name}_dtype"
                listed = ", ".join(map(str, known))
                raise ValueError(f"[FusedAdam] expected {argument} in {{{listed}}}, got {dtype}")
        scaled = [f"{dtype} for {name}" for name, dtype in self.dtypes.items() if dtype in _LARGEST]
        if capturable and scaled:
            raise NotImplementedError(
                "[FusedAdam] expected states of torch.float32 or torch.bfloat16 with"
                f" capturable=True, got {', '.join(scaled)}"
            )

    def is_split(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter holds the high bits of its master weight."""
        plain = type(parameter) in PLAIN_TYPES
        return self.remainders and plain and parameter.dtype is torch.bfloat16

    def join_unless_split(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        """Store the whole master weight of a parameter that is no longer in bf16."""
        low = state.get(_MASTER)
        if low is not None and low.dtype is torch.int16 and parameter.dtype is not torch.bfloat16:
            state[_MASTER] = joined_master(parameter.detach(), low)

    def value(self, state: Mapping[str, Any], parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The fp32 value of a state; without a master weight, the value of the parameter.

        `state` is what is stored for the parameter, by name.

        Raises:
            ValueError: no such state yet.
        """
        found = state.get(name)
        if found is None and name != _MASTER:
            raise ValueError(
                f"[FusedAdam] expected {name} of the parameter, which its first step and"
                " initialize_state make, got none"
            )
        if found is None:
            return parameter.float().contiguous()
        if found.dtype is torch.float32:
            return found
        if found.dtype is torch.int16:
            return joined_master(parameter.detach(), found)
        if found.dtype is torch.uint8:
            found = found.view(torch.float8_e4m3fn)
        scale = self._scales.get(parameter, {}).get(name)
        return found.float() if scale is None else found.float() * scale

    def store(
        self, state: dict[str, Any], parameter: torch.Tensor, name: str, value: torch.Tensor
    ) -> None:
        """Store the fp32 value of a state, of the parameter's shape; in place, if there is one.

        If the master weight is split, the parameter is written too, because it has the high bits.
        """
        if name == _MASTER and self.is_split(parameter):
            high, made = split_master(value)
            parameter.detach().copy_(high)
        else:
            made, scale = _encoded(value, self.dtypes.get(name, torch.float32))
            if scale is not None:
                self._scales.setdefault(parameter, {})[name] = scale
        if name in state and state[name].dtype is made.dtype:
            state[name].copy_(made)
        else:
            state[name] = made


def _encoded(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A value converted to a dtype, and the tensor's scale; None for dtypes without a scale."""
    largest = _LARGEST.get(dtype)
    if largest is None:
        return value.to(dtype), None
    if is_dtensor(value):
        raise NotImplementedError(
            "[FusedAdam] expected states of DTensors in torch.float32 or torch.bfloat16, got"
            f" {dtype}"
        )
    scale = (value.abs().amax() if value.numel() else value.new_zeros(())) / largest
    scale = torch.where(scale > 0.0, scale, torch.ones_like(scale))
    scaled = value / scale
    if dtype is torch.uint8:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale
    return scaled.to(dtype), scale


def split_master(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an fp32 master weight into the bf16 parameter and the low bits as int16."""
    bits = value.masked_fill(value.isnan(), torch.nan).contiguous().view(torch.int32)
    low = bits.to(torch.int16)
    high = (bits >> 16) + (low < 0)
    return high.to(torch.int16).view(torch.bfloat16), low


def joined_master(parameter: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Reverse `split_master`; the parameter may have been converted to another dtype since."""
    high = parameter.bfloat16().contiguous().view(torch.int16).to(torch.int32) - (low < 0).int()
    return ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)
