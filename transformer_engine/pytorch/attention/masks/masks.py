"""Which keys a query may see: mask types, sliding windows and padding, combined into one `Mask`.

In every mask True means hidden. Query i sees key j if no mask hides it and

    i + diagonal - left <= j <= i + diagonal + right

where a negative `left` or `right` is no limit.

`causal` is the band left = -1, right = 0. Its diagonal is 0 (top-left: query 0 sees key 0) or
keys - queries (bottom-right: the last query sees the last key):

    top-left        bottom-right        queries 3, keys 5, "x" = seen
    x . . . .       x x x . .
    x x . . .       x x x x .
    x x x . .       x x x x x
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.capture import memoize
from transformer_engine.pytorch.fp8.exporting import exporting
from transformer_engine.pytorch.module.inputs import check_tensors
from transformer_engine.pytorch.notices import warn

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)
CAUSAL_WINDOW: Window = (-1, 0)


class MaskType(NamedTuple):
    """The properties of a mask type."""

    padding: bool = False
    causal: bool = False
    bottom_right: bool = False
    arbitrary: bool = False


MASK_TYPES = {
    "no_mask": MaskType(),
    "padding": MaskType(padding=True),
    "causal": MaskType(causal=True),
    "padding_causal": MaskType(padding=True, causal=True),
    "causal_bottom_right": MaskType(causal=True, bottom_right=True),
    "padding_causal_bottom_right": MaskType(padding=True, causal=True, bottom_right=True),
    "arbitrary": MaskType(arbitrary=True),
}

_ALIASES = {
    "padding,causal": "padding_causal",
    "causal,padding": "padding_causal",
    "padding,causal_bottom_right": "padding_causal_bottom_right",
    "causal_bottom_right,padding": "padding_causal_bottom_right",
}


def mask_type(name: str, parameter: str = "attn_mask_type") -> MaskType:
    """The mask type of this name; "padding,causal" and "causal,padding" are the same type."""
    if not isinstance(name, str):
        raise TypeError(f"[attention] expected {parameter} to be a str, got {name!r}")
    found = MASK_TYPES.get(_in_one_spelling(name))
    if found is None:
        known = ", ".join(MASK_TYPES)
        raise ValueError(f"[attention] expected {parameter} in {{{known}}}, got {name!r}")
    return found


def mask_name(kind: MaskType) -> str:
    """The name of a mask type; "arbitrary" also for a part of a call that adds a causal band."""
    if kind.arbitrary:
        return "arbitrary"
    return next(name for name, one in MASK_TYPES.items() if one == kind)


def _in_one_spelling(name: str) -> str:
    return _ALIASES.get(name.replace(" ", ""), name)


def bottom_right(name: str) -> str:
    """The mask type for queries that are the last of a sequence, as in generation."""
    name = _in_one_spelling(name)
    return f"{name}_bottom_right" if name in ("causal", "padding_causal") else name


def as_window(window: Sequence[int] | None) -> Window | None:
    """A window, which may be any sequence, as a tuple of ints.

    Other types than ints are refused: functions are memoised by the window, and a cache would take
    `1`, `True` and `1.0` for the same key.
    """
    if window is None or (type(window) is tuple and [*map(type, window)] == [int, int]):
        return window  # the quick way, because every call may give a window
    try:
        if not isinstance(window, Sequence) or any([isinstance(side, bool) for side in window]):
            raise TypeError
        return tuple([operator.index(side) for side in window])  # type: ignore[return-value]
    except TypeError:
        raise TypeError(
            f"[attention] expected window_size (left, right) of integers, got {window!r}"
        ) from None


class MaskRule(NamedTuple):
    """A mask type with its window, before any sizes are known."""

    type: MaskType
    left: int
    right: int
    bottom_right: bool


@memoize
def mask_rule(
    name: str,
    window: Window | None = None,
    bottom_right: bool | None = None,
    parameter: str = "attn_mask_type",
) -> MaskRule:
    """Combine a mask type and a window; memoised, so a warning comes once per combination.

    Args:
        name: a mask type.
        window: `(left, right)`; None for no window.
        bottom_right: for types that are not causal, whether the diagonal of the window ends
            bottom-right; None is True.
        parameter: what to call the mask type in an error.
    """
    kind = mask_type(name, parameter)
    left, right = _window_of(kind, window, name)
    if kind.causal:
        bottom_right = kind.bottom_right
    return MaskRule(kind, left, right, bottom_right is None or bottom_right)


def _window_of(kind: MaskType, window: Window | None, name: str) -> Window:
    default = CAUSAL_WINDOW if kind.causal else NO_WINDOW
    if window is None:
        return default
    if len(window) != 2 or min(window) < -1:
        raise ValueError(
            "[attention] expected window_size (left, right) of integers >= -1 (-1 is unlimited),"
            f" got {window}"
        )
    left, right = window
    if kind.causal:
        if right != 0 and window != NO_WINDOW:
            _warn(f"window_size {window} of the mask type {name!r} is taken as {(left, 0)}")
        return left, 0
    if window == CAUSAL_WINDOW:
        _warn(f"window_size (-1, 0) of the mask type {name!r}, which is not causal, is no window")
        return NO_WINDOW
    return window


def _warn(message: str) -> None:
    warn(f"[attention] {message}", stacklevel=4)


@dataclass(frozen=True, slots=True)
class Padding:
    """Which tokens of a batch are padding.

    Attributes:
        queries: bool `[batch, 1, 1, queries]`, True = padding.
        keys: bool `[batch, 1, 1, keys]`.
    """

    queries: torch.Tensor
    keys: torch.Tensor

    def hidden(self) -> torch.Tensor:
        """Bool `[batch, 1, queries, keys]`: a query that is padding sees nothing either."""
        return self.queries.transpose(-1, -2) | self.keys

    def shift(self) -> torch.Tensor | None:
        """For each sequence, the position of its last real key minus that of its last real query.

        `[batch, 1, 1, 1]`; None if queries and keys share one mask, so that all are zero.
        """
        return None if self.queries is self.keys else _end(self.keys) - _end(self.queries)


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask as backends take it: a query sees a band of keys, except those that `hidden` hides.

    Attributes:
        hidden: bool, broadcastable to `[batch, heads, queries, keys]`; None hides nothing.
        left: how many keys before the diagonal a query sees; -1 for all.
        right: how many keys after the diagonal a query sees; -1 for all.
        diagonal: the key that lies on the diagonal for query 0; for query i it is i keys later.
    """

    hidden: torch.Tensor | None = None
    left: int = -1
    right: int = -1
    diagonal: int = 0

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.hidden is None and self.left < 0 and self.right < 0

    @property
    def causal(self) -> bool:
        """Whether this is exactly the causal mask whose diagonal begins top-left."""
        band = (self.left, self.right, self.diagonal)
        return self.hidden is None and band == (-1, 0, 0)

    def may_blind(self, queries: int, keys: int) -> bool:
        """Whether a query may see no key: True with any `hidden`, whose values are not read."""
        first_sees_none = self.right >= 0 and self.diagonal + self.right < 0
        last_sees_none = self.left >= 0 and queries - 1 + self.diagonal - self.left > keys - 1
        return self.hidden is not None or first_sees_none or last_sees_none

    def dense(self, queries: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """The whole mask as one bool tensor, band included; None where `full`."""
        if self.left < 0 and self.right < 0:
            return self.hidden
        band = outside_band(queries, keys, self.left, self.right, self.diagonal, device)
        return band if self.hidden is None else band | self.hidden


def outside_band(
    queries: int,
    keys: int,
    left: int,
    right: int,
    diagonal: int | torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """Bool `[queries, keys]`, True outside of the band.

    With a tensor `[batch, 1, 1, 1]` as `diagonal`, the result is `[batch, 1, queries, keys]`.
    """
    centre = torch.arange(queries, device=device)[:, None] + diagonal
    key = torch.arange(keys, device=device)
    hidden = torch.zeros((), dtype=torch.bool, device=device)
    if left >= 0:
        hidden = hidden | (key < centre - left)
    if right >= 0:
        hidden = hidden | (key > centre + right)
    return hidden


def build_mask(
    rule: MaskRule,
    queries: int,
    keys: int,
    padding: Padding | None = None,
    arbitrary: torch.Tensor | None = None,
) -> Mask:
    """The mask of a rule for the longest query sequence and the longest key sequence.

    Padding types take `padding`; the type `arbitrary` takes the user's mask.
    """
    hidden = padding.hidden() if padding is not None else arbitrary
    left, right = rule.left, rule.right
    if left < 0 and right < 0:
        return Mask(hidden)
    diagonal = keys - queries if rule.bottom_right else 0
    if rule.bottom_right and padding is not None:
        shift = padding.shift()
        if shift is not None:  # each sequence has another diagonal, which one band cannot express
            off_band = outside_band(queries, keys, left, right, shift, shift.device)
            return Mask(off_band | padding.hidden())
        diagonal = 0
    if exporting():  # sizes may be symbols, and comparing them would limit the graph to some sizes
        return Mask(hidden, left, right, diagonal)
    if left >= queries - 1 + diagonal:
        left = -1
    if right >= keys - 1 - diagonal:
        right = -1
    # Where torch traces sizes as symbols, so is the diagonal; `Mask.causal` must not become one.
    moved = (left >= 0 or right >= 0) and diagonal != 0
    return Mask(hidden, left, right, diagonal if moved else 0)


def padding_from_masks(
    attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    batch: int,
    queries: int,
    keys: int,
) -> Padding:
    """Check the masks of a padding type: one `[batch, 1, 1, sequence]`, or one per side."""
    pair = attention_mask if isinstance(attention_mask, tuple | list) else (attention_mask,)
    if len(pair) not in (1, 2):
        raise ValueError(f"[attention] expected one or two attention masks, got {len(pair)}")
    for mask, size, side in zip(
        (pair[0], pair[-1]), (queries, keys), ("query", "key"), strict=True
    ):
        check_mask_dtype(mask, "attention_mask")
        if tuple(mask.shape) != (batch, 1, 1, size):
            raise ValueError(
                f"[attention] expected the {side} padding mask in attention_mask of shape"
                f" {(batch, 1, 1, size)}, got {tuple(mask.shape)}"
            )
    return Padding(pair[0], pair[-1])


def padding_from_lengths(
    query_lengths: torch.Tensor, key_lengths: torch.Tensor, queries: int, keys: int
) -> Padding:
    """Padding after each sequence's end; lengths are integers `[batch]`."""
    query_padding = _beyond(query_lengths, queries)
    if query_lengths is key_lengths and queries == keys:
        return Padding(query_padding, query_padding)
    return Padding(query_padding, _beyond(key_lengths, keys))


def _end(padding: torch.Tensor) -> torch.Tensor:
    """The position behind the last real token of each sequence, `[batch, 1, 1, 1]`."""
    if padding.shape[-1] == 0:
        return padding.new_zeros((*padding.shape[:-1], 1), dtype=torch.int64)
    positions = torch.arange(1, padding.shape[-1] + 1, device=padding.device)
    return torch.where(padding, 0, positions).amax(-1, keepdim=True)


def _beyond(lengths: torch.Tensor, size: int) -> torch.Tensor:
    return torch.arange(size, device=lengths.device) >= lengths[:, None, None, None]


def check_arbitrary(mask: Any, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Check that a mask of the type `arbitrary` broadcasts to `[batch, heads, queries, keys]`."""
    if mask is None:
        raise ValueError(
            "[attention] expected attention_mask for the mask type 'arbitrary', got None"
        )
    mask = check_mask_dtype(mask, "attention_mask")
    check_broadcasts("an attention_mask", mask.shape, shape)
    return mask


def check_broadcasts(
    what: str, sizes: Sequence[int], shape: tuple[int, int, int, int], fewest: int = 0
) -> None:
    """Raise ValueError unless a tensor broadcasts to `[batch, heads, queries, keys]`, the `shape`.

    It must have `fewest` dimensions or more. `what` names it in the error, with an article.
    """
    fits = fewest <= len(sizes) <= 4 and all(
        size in (1, expected) for size, expected in zip(sizes[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"[attention] expected {what} that broadcasts to {shape}"
            f" (batch, heads, queries, keys), got {tuple(sizes)}"
        )


def check_mask_dtype(mask: torch.Tensor, parameter: str) -> torch.Tensor:
    """Raise TypeError unless a mask is a bool tensor."""
    check_tensors("attention", **{parameter: mask})
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"[attention] expected {parameter} of dtype torch.bool (True = hidden), got"
            f" {mask.dtype}"
        )
    return mask
