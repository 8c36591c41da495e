"""The angles by which rotary position embedding rotates pairs of elements: position * frequency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from transformer_engine.pytorch.module.arguments import check_numbers, check_sizes
from transformer_engine.pytorch.module.parameters import default_device


class RotaryPositionEmbedding(torch.nn.Module):
    """The angle of each position and element.

    Pair i of n rotates by position * `rotary_base ** (-i / n)`. These frequencies are the buffer
    `inv_freq`, fp32 `[dim / 2]`. You may replace it, for example by the scaled frequencies of
    Llama. The buffer stays fp32 after `module.half()`. If FSDP casts it to 16 bit, frequencies that
    have only been rounded by that are computed again in fp32. State dicts do not contain it, but it
    is loaded from a checkpoint that does. It is computed again when `dim` or `rotary_base` is set,
    and when the module leaves the device `meta`.

    Args:
        dim: size of a head.
        rotary_percent: fraction of a head's elements that is rotated, in (0, 1].
        seq_len_interpolation_factor: positions are divided by this factor; None for 1.
        pretrained_max_position_embeddings: maximum length in pretraining. With a factor, positions
            of sequences longer than this length times the factor are divided by (sequence length /
            this length) instead.
        rotary_base: the lowest frequency is about 1 / rotary_base.
        interleaved: pairs are neighbours, (0, 1), (2, 3), ...; else they are elements of the two
            halves, (0, dim / 2), (1, dim / 2 + 1), ...

    Raises:
        ValueError: an odd number of elements to rotate; an invalid percentage, factor or base.
        TypeError: arguments that are not numbers.

    Example:
        >>> RotaryPositionEmbedding(64)(16).shape
        torch.Size([16, 1, 1, 64])
    """

    inv_freq: torch.Tensor
    dim: int
    rotary_base: float

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("RotaryPositionEmbedding", None, dim=dim)
        check_numbers("RotaryPositionEmbedding", None, rotary_percent=rotary_percent)
        factor, longest = seq_len_interpolation_factor, pretrained_max_position_embeddings
        if factor is not None:
            check_numbers("RotaryPositionEmbedding", None, seq_len_interpolation_factor=factor)
        if longest is not None:
            check_sizes("RotaryPositionEmbedding", None, pretrained_max_position_embeddings=longest)
        if not 0.0 < rotary_percent <= 1.0 or (factor is not None and not factor > 0.0):
            raise ValueError(
                "[RotaryPositionEmbedding] expected rotary_percent in (0, 1] and"
                f" seq_len_interpolation_factor > 0 or None, got {rotary_percent} and {factor}"
            )
        self.dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        frequencies = self._frequencies(default_device(None))
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """See `torch.nn.Module`. Setting `dim` or `rotary_base` computes the frequencies again."""
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        is_built = "inv_freq" in self.__dict__.get("_buffers", ())
        if is_built and name in ("dim", "rotary_base") and value != before:
            try:
                self.inv_freq = self._frequencies(self.inv_freq.device)
            except Exception:
                self.__dict__[name] = before
                raise

    def reset_parameters(self) -> None:
        """Compute frequencies that are on `meta`, on the default device; leave others."""
        if self.inv_freq.is_meta:
            self.inv_freq = self._frequencies(default_device(None))

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                "[RotaryPositionEmbedding] expected an even number of elements to rotate, got"
                f" {self.dim}"
            )
        check_numbers("RotaryPositionEmbedding", None, rotary_base=self.rotary_base)
        if not self.rotary_base > 0.0:
            raise ValueError(
                f"[RotaryPositionEmbedding] expected rotary_base > 0, got {self.rotary_base}"
            )
        step = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        return 1.0 / (self.rotary_base ** (step / self.dim))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """See `torch.nn.Module`. The frequencies change their device, but not dtype or values."""
        before = self.inv_freq
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        self.inv_freq = self._frequencies(device) if before.is_meta else before.to(device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also load frequencies, which checkpoints of NVIDIA's package contain."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key, own = prefix + "inv_freq", self.inv_freq
        loaded = state_dict.get(key)
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        if loaded is not None and loaded.shape != own.shape:
            error_msgs.append(
                f"[RotaryPositionEmbedding] expected {key} of shape {tuple(own.shape)}, got"
                f" {tuple(loaded.shape)}"
            )
        elif loaded is not None and not loaded.is_meta:
            device = loaded.device if own.is_meta else own.device
            exact = self._frequencies(device) if own.is_meta else own
            self.inv_freq = _widened(loaded.detach().to(device), exact)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of the positions from `offset` on, fp32 `[max_seq_len, 1, 1, dim]`.

        Args:
            max_seq_len: number of positions, 0 or more.
            offset: the first position.

        Raises:
            ValueError: `inv_freq` of another number of elements.
        """
        if not torch.compiler.is_compiling():
            check_sizes("RotaryPositionEmbedding", None, 0, max_seq_len=max_seq_len)
        frequencies, device = self.inv_freq, self.inv_freq.device
        if frequencies.shape != (self.dim // 2,):
            raise ValueError(
                f"[RotaryPositionEmbedding] expected inv_freq of shape ({self.dim // 2},), got"
                f" {tuple(frequencies.shape)}"
            )
        if frequencies.dtype is not torch.float32:
            frequencies = _widened(frequencies, self._frequencies(device))
        position = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        position = position / self._interpolation(max_seq_len)
        angle = position[:, None] * frequencies
        if self.interleaved:
            angle = angle.repeat_interleave(2, dim=-1)
        else:
            angle = torch.cat((angle, angle), dim=-1)
        return angle[:, None, None, :]

    def _interpolation(self, max_seq_len: int) -> float:
        """What positions are divided by."""
        factor = self.seq_len_interpolation_factor
        if factor is None:
            return 1.0
        pretrained = self.pretrained_max_position_embeddings
        if pretrained is not None and max_seq_len > pretrained * factor:
            return max_seq_len / pretrained
        return float(factor)


def _widened(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The values in fp32; where a value is `exact` rounded to its dtype, `exact` itself."""
    return torch.where(exact.to(values.dtype) == values, exact, values.float())
