"""Process groups that users pass, and the tensor parallel ranks that share a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.parallel.construction import Remakable
from transformer_engine.pytorch.parallel.overlap import NO_OVERLAP


def check_group(op: str, argument: str, group: Any, layer: str | None = None) -> None:
    """Raise TypeError unless this is a process group, None, or torch's mark of a non-member."""
    if group is None or not dist.is_available():
        return
    if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    where = f" (layer {layer})" if layer else ""
    raise TypeError(
        f"[{op}] expected {argument} to be a process group of torch.distributed or None, got "
        f"{group!r}{where}"
    )


def group_size(group: Any) -> int:
    """The number of ranks in a group; 1 without a group or without torch.distributed."""
    if group is None or not (dist.is_available() and dist.is_initialized()):
        return 1
    return max(dist.get_world_size(group), 1)  # torch says -1 to those that are not members


class TensorParallel:
    """The tensor parallel ranks of a module.

    Stages hold this object, not the group, because the group may be set after they are made.

    Args:
        op: class of the module, for messages.
        layer: name of the module, for messages.
        group: process group; None if `set_group` follows before the first forward.
        size: the number of ranks that share the module; may be 1 if there is a group.
        sequence: activations outside the parallel region are sharded along their first axis.

    Attributes:
        used: a forward has run, so the group can no longer change.
        overlap: the collectives that run in chunks; none without `sequence`.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: a group whose size is not `size`.
    """

    def __init__(self, op: str, layer: str, group: Any, size: int, sequence: bool = False) -> None:
        check_group(op, "tp_group", group, layer)
        self.op, self.layer = op, layer
        self.group = group
        found = group_size(group)
        if found > 1 and size not in (1, found):
            self._refuse(f"tp_group of tp_size={size} ranks", f"one of {found}")
        self.size = max(size, found)
        self.sequence = bool(sequence) and self.size > 1
        self.used = False
        self.overlap = NO_OVERLAP

    def __deepcopy__(self, memo: object) -> TensorParallel:
        # A copied module works with the same ranks; groups themselves cannot be copied.
        copy = TensorParallel.__new__(TensorParallel)
        copy.__dict__.update(self.__dict__)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be saved: set one after loading the module.
        return {**self.__dict__, "group": None, "used": False}

    def set_group(self, group: Any) -> None:
        """Set the group; it must have `size` ranks.

        Raises:
            TypeError: not a process group.
            ValueError: a group of another size, or another group after the first forward.
        """
        check_group(self.op, "tp_group", group, self.layer)
        size = group_size(group)
        if group is not None and size not in (1, self.size):
            self._refuse(f"a tp_group of tp_size={self.size} ranks", f"one of {size}")
        if self.used and group is not self.group:
            self._refuse("set_tensor_parallel_group before the first forward", "another group")
        self.group = group

    @property
    def rank(self) -> int | None:
        """The rank of this process in the group; None if there is no group yet."""
        if self.size == 1:
            return 0
        return dist.get_rank(self.group) if group_size(self.group) == self.size else None

    def check(self) -> Any:
        """The group, for a collective of a forward.

        A backward reads `group` instead: torch 2.11 does not compile a backward that sets `used`.

        Raises:
            RuntimeError: the group was not set.
        """
        # If compiled code read `used`, the second call would compile again, as `used` has changed.
        if torch.compiler.is_compiling() or not self.used:
            found = group_size(self.group)
            if found != self.size:
                raise RuntimeError(
                    f"[{self.op}] TP group not initialized: expected set_tensor_parallel_group "
                    f"with a group of tp_size={self.size} ranks before the first forward, got "
                    f"{'none' if self.group is None else found} (layer {self.layer})"
                )
            self.used = True
        return self.group

    def share(self, what: str, count: int) -> int:
        """`count` divided by the number of ranks.

        Raises:
            ValueError: it is not divisible; the message calls it `what`.
        """
        if count % self.size:
            self._refuse(f"{what} divisible by tp_size={self.size}", str(count))
        return count // self.size

    def _refuse(self, expected: str, got: str) -> None:
        raise ValueError(f"[{self.op}] expected {expected}, got {got} (layer {self.layer})")


def check_amax_group(ranks: TensorParallel, recipe: Any, fp8_group: Any) -> None:
    """Check that ranks which hold parts of one tensor will compute equal scales for it.

    Raises:
        ValueError: delayed scaling does not reduce amaxes, or not over all of these ranks.
    """
    if not ranks.sequence or not hasattr(recipe, "reduce_amax") or ranks.group is None:
        return
    where = f"with sequence_parallel=True (layer {ranks.layer})"
    if not recipe.reduce_amax:
        raise ValueError(
            f"[{ranks.op}] expected a recipe with reduce_amax=True, got False, {where}"
        )
    if fp8_group is None or not dist.is_initialized():
        return
    missing = set(dist.get_process_group_ranks(ranks.group))
    missing -= set(dist.get_process_group_ranks(fp8_group))
    if missing:
        raise ValueError(
            f"[{ranks.op}] expected an fp8_group with all ranks of tp_group, got one without "
            f"{sorted(missing)}, {where}"
        )


class SharedByRanks(Remakable):
    """Base of modules that tensor parallel ranks may share.

    Attributes:
        ranks: the ranks that share the module.
    """

    ranks: TensorParallel

    @property
    def tp_group(self) -> Any:
        """The tensor parallel group; None if it has not been set."""
        return self.ranks.group

    @property
    def tp_size(self) -> int:
        """How many tensor parallel ranks share the module."""
        return self.ranks.size

    @tp_size.setter
    def tp_size(self, size: int) -> None:
        # Megatron-Core's subclasses set this before they pass the same size to the constructor.
        if "ranks" in self.__dict__ and size != self.ranks.size:
            raise ValueError(
                f"[{self.ranks.op}] expected tp_size={self.ranks.size} of the constructor, got "
                f"{size} (layer {self.ranks.layer})"
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor parallel group before the first forward.

        Args:
            tp_group: process group of `tp_size` ranks.

        Raises:
            TypeError: not a process group.
            ValueError: a group of another size, or another group after the first forward.
        """
        self.ranks.set_group(tp_group)
