"""Memory of the caches of layers.

In the plain form of `InferenceParams` a cache is `[max_sequence_length, max_batch_size, heads,
size]`; in the form with a cache manager it is a `LayerCaches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import as_tensor, can_read, check_integers

Caches = tuple[torch.Tensor, torch.Tensor]


def integers_on(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """The values as an int64 tensor. The host does not wait for a GPU.

    CUDA has copied memory that is not pinned when the call returns, so it may be freed.
    """
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


class LayerCaches(MutableMapping[int, Caches]):
    """The keys and values of a cache manager by layer number, as views of the layers' memory.

    If a program assigns other tensors to a layer, as beam search does to reorder sequences, they
    are copied into the layer's memory, where steps and CUDA graphs find them.

    Args:
        memory: keys and values of each layer, as rows of `[heads, size]`. The last row is spare,
            and not part of the views.
        sizes: returns dimensions 0 and 1 of the views.
    """

    def __init__(self, memory: dict[int, Caches], sizes: Callable[[], tuple[int, int]]) -> None:
        self.memory = memory
        self._sizes = sizes

    def __getitem__(self, layer_number: int) -> Caches:
        keys, values = self.memory[layer_number]
        sizes = self._sizes()
        with outside_of_inference_mode():
            return keys[:-1].unflatten(0, sizes), values[:-1].unflatten(0, sizes)

    def __setitem__(self, layer_number: int, caches: Caches) -> None:
        """Copy keys and values into the memory of a layer, which is made if there is none yet.

        Raises:
            ValueError: other shapes.
            RuntimeError: no memory yet, and a CUDA graph is being captured.
        """
        own = self.memory.get(layer_number)
        pair = caches if isinstance(caches, tuple | list) else (caches,)
        _check_shapes(layer_number, self._sizes(), own, pair)
        if own is not None:
            for row, other in zip(own, pair, strict=True):
                row[:-1].copy_(other.detach().flatten(0, 1))
            return
        refuse_new_cache(layer_number)
        with outside_of_inference_mode():
            keys, values = (
                torch.cat((one.detach().flatten(0, 1), one.new_zeros(1, *one.shape[2:])))
                for one in pair
            )
        self.memory[layer_number] = keys, values

    def __delitem__(self, layer_number: int) -> None:
        del self.memory[layer_number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.memory)

    def __len__(self) -> int:
        return len(self.memory)

    def __ior__(self, other: Mapping[int, Caches]) -> LayerCaches:
        self.update(other)
        return self


def _check_shapes(
    layer_number: int, sizes: tuple[int, int], own: Caches | None, pair: Sequence[Any]
) -> None:
    """Raise ValueError unless `pair` fits the layer's memory `own`, or could become its memory."""
    any_end = ("heads", "size")
    expected = [
        (*sizes, *end) for end in ([one.shape[1:] for one in own] if own else [any_end] * 2)
    ]
    got: list[Any] = [
        tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__ for one in pair
    ]
    found = got if own else [(*one[:2], *any_end) if len(one) == 4 else one for one in got]
    if found != expected:
        raise ValueError(
            f"[InferenceParams] expected keys and values of {expected} for the cache of layer"
            f" number {layer_number}, got {got}"
        )


def outside_of_inference_mode() -> AbstractContextManager[Any]:
    """A context whose tensors can be written with and without `torch.inference_mode`."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def refuse_new_cache(layer_number: int | None) -> None:
    """Raise RuntimeError in the capture of a CUDA graph: replays would clear a cache made there."""
    if is_capturing():
        raise RuntimeError(
            "[InferenceParams] expected a cache of layer number"
            f" {layer_number} before the capture of a CUDA graph, got none: run a step of the model"
            " (a warm-up) before, or allocate_memory"
        )


def plain_caches(
    memory: dict[int | None, Caches],
    layer_number: int | None,
    key: torch.Tensor,
    value: torch.Tensor,
    sizes: tuple[int, int],
) -> Caches:
    """The caches of a layer, which are made in its first step.

    `key` and `value` are `[sequence, batch, heads, size]`, in the dtype of the cache; `sizes` are
    the most tokens and the most sequences.

    Raises:
        ValueError: other heads, sizes or dtypes than those of the cache; see also `check_pair`.
        RuntimeError: no cache yet, and a CUDA graph is being captured.
    """
    caches = memory.get(layer_number)
    if caches is None:
        refuse_new_cache(layer_number)
        with outside_of_inference_mode():
            caches = (
                key.new_zeros(*sizes, *key.shape[2:]),
                value.new_zeros(*sizes, *value.shape[2:]),
            )
        memory[layer_number] = caches
    check_pair(layer_number, key, value)
    for cache, new in zip(caches, (key, value), strict=True):
        if (cache.dtype, cache.shape[2:]) != (new.dtype, new.shape[2:]):
            raise ValueError(
                f"[InferenceParams] expected keys and values of {tuple(cache.shape[2:])} in"
                f" {cache.dtype}, as in the cache of layer number {layer_number}, got"
                f" {tuple(new.shape[2:])} in {new.dtype}"
            )
    return caches


def check_pair(layer_number: int | None, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError unless key and value have the same tokens, sequences and heads."""
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            "[InferenceParams] expected keys and values of the same tokens, sequences and heads,"
            f" got {tuple(key.shape)} and {tuple(value.shape)} (layer number {layer_number})"
        )


def check_room(caches: Caches, layer_number: int | None, sizes: tuple[int, int]) -> None:
    """Raise ValueError unless the caches have these tokens, and as many sequences or more."""
    for cache in caches:
        if cache.shape[0] != sizes[0] or cache.shape[1] < sizes[1]:
            raise ValueError(
                f"[InferenceParams] expected keys and values of {sizes[0]} tokens and at least"
                f" {sizes[1]} sequences in the cache of layer number {layer_number}, got"
                f" {tuple(cache.shape)}"
            )


def write_rows(cache: torch.Tensor, rows: torch.Tensor, new: torch.Tensor, max_batch: int) -> None:
    """Write new tokens `[tokens, heads, size]` to rows, see `FixedStep`, of a plain cache."""
    if cache.is_contiguous() and cache.shape[1] == max_batch:
        cache.flatten(0, 1).index_copy_(0, rows, new)
    else:  # a program has replaced the cache; this is slower
        cache.index_put_((rows // max_batch, rows % max_batch), new)


def in_format(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """Convert between a format and that of caches, in both directions: `[sequence, batch, ...]`."""
    return x.transpose(0, 1) if qkv_format == "bshd" else x


def check_optional(**sizes: int | None) -> None:
    """Check optional sizes of caches, see `check_sizes`."""
    present = {name: size for name, size in sizes.items() if size is not None}
    check_sizes("InferenceParams", None, **present)


def check_cache(caches: Mapping[int, Caches], layer_number: int) -> None:
    """Raise ValueError unless a layer has a cache."""
    if layer_number not in caches:
        raise ValueError(
            "[InferenceParams] expected a step or allocate_memory before, got no cache (layer"
            f" number {layer_number})"
        )


def as_indices(batch_indices: Any) -> torch.Tensor:
    """Indices of sequences as a tensor; raise TypeError unless they are integers."""
    op = "InferenceParams"
    index = as_tensor(op, "batch_indices of int32 or int64", batch_indices)
    check_integers(op, batch_indices=index)
    return index


def reorder(memory: Iterable[torch.Tensor], batch_indices: torch.Tensor) -> None:
    """In place, sequence i becomes what `batch_indices[i]` was; sequences without an index stay.

    Sequences are dimension 1 of each tensor in `memory`.

    Raises:
        ValueError: more sequences than there is room for; indices out of range.
    """
    index = batch_indices
    known = index.tolist() if can_read(index) else []
    for cache in memory:
        if index.ndim != 1 or index.shape[0] > cache.shape[1]:
            raise ValueError(
                f"[InferenceParams] expected batch_indices of at most {cache.shape[1]} sequences,"
                f" got {tuple(index.shape)}"
            )
        last = cache.shape[1] - 1
        if any(not 0 <= i <= last for i in known):
            raise ValueError(
                f"[InferenceParams] expected batch_indices from 0 to {last}, got {known}"
            )
        index = index.to(cache.device)
        cache[:, : index.shape[0]] = cache[:, index]


def reorder_lengths(
    lengths: torch.Tensor, batch_indices: torch.Tensor, first: int, max_batch: int
) -> None:
    """`reorder` for the lengths of the sequences from `first` on; others have no tokens."""
    of_all = lengths.new_zeros(1, max_batch)
    of_step = of_all[0, first : first + lengths.shape[0]].copy_(lengths)
    reorder([of_all], batch_indices)
    lengths.copy_(of_step)
