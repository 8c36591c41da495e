"""Ranks and gathering, warnings, and checks of arguments."""

from __future__ import annotations

import difflib
import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

from nvdlfw_inspect import _env

_MISSPELT = 0.85  # cutoff of difflib: keywords that differ in one or two letters
_Class = TypeVar("_Class", bound=type)
# Packages whose frames are skipped when a warning looks for the line of the user's program.
_PASSED_BY = ("nvdlfw_inspect", "transformer_engine", "torch", "contextlib", "importlib")


def _distributed() -> Any:
    """Return `torch.distributed` if a process group is initialized, else None."""
    if sys.modules.get("torch") is None:  # not imported, or blocked
        return None
    distributed = importlib.import_module("torch.distributed")
    running = distributed.is_available() and distributed.is_initialized()
    return distributed if running else None


def get_distributed_world_size(group: Any = None) -> int:
    """Return the size of a group (default: all ranks); 1 without `torch.distributed`."""
    distributed = _distributed()
    return distributed.get_world_size(group) if distributed else 1


def get_distributed_rank() -> int:
    """Return the rank of this process; before the process group exists, that of the launcher."""
    distributed = _distributed()
    return distributed.get_rank() if distributed else _env.launched_rank()


def process_group(op: str, group: Any) -> Any:
    """Return a process group of this rank: the argument, or the group of a mesh; None stays None.

    Raises:
        TypeError: `group` is something else.
        ValueError: This rank is not in the group.
    """
    if group is None:
        return None
    if hasattr(group, "get_group") and group.ndim == 1:
        group = group.get_group()
    distributed: Any = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "ProcessGroup", None)
    outside = kind is not None and group is distributed.GroupMember.NON_GROUP_MEMBER
    if kind is None or not (outside or isinstance(group, kind)):
        raise TypeError(
            f"[{op}] expected group to be a process group of torch.distributed, a DeviceMesh of"
            f" one dimension or None, got {group!r}"
        )
    if outside or (distributed.is_initialized() and distributed.get_rank(group) < 0):
        raise ValueError(f"[{op}] expected group to have this rank as a member, got another group")
    return group


def gather_along_first_dim(
    input_: Any, process_group: Any = None, async_op: bool = False
) -> tuple[Any, Any]:
    """Gather a tensor of all ranks along its first dimension.

    Args:
        input_: A tensor. Its dtype, and its shape except for the first dimension, must be the same
            on all ranks of the group.
        process_group: The group; None: all ranks.
        async_op: Return before the collective has finished. If ranks have different first sizes,
            the function waits in any case.

    Returns:
        The gathered tensor, and the handle of the collective (None unless `async_op`).
    """
    ranks = get_distributed_world_size(process_group)
    if ranks == 1:
        return input_, None
    distributed = _distributed()
    size = input_.new_tensor([input_.shape[0]], dtype=int)
    of_ranks = size.new_empty(ranks)
    distributed.all_gather_into_tensor(of_ranks, size, group=process_group)
    sizes = of_ranks.tolist()
    room = max(sizes)
    own = input_.contiguous()
    if min(sizes) < room:
        own = input_.new_zeros((room, *input_.shape[1:]))
        own[: input_.shape[0]] = input_
    gathered = input_.new_empty((ranks * room, *input_.shape[1:]))
    handle = distributed.all_gather_into_tensor(
        gathered, own, group=process_group, async_op=async_op
    )
    if min(sizes) == room:
        return gathered, handle
    if handle is not None:
        handle.wait()
    cut = input_.new_empty((sum(sizes), *input_.shape[1:]))
    for part, padded in zip(cut.split(sizes), gathered.split(room), strict=True):
        part.copy_(padded[: part.shape[0]])
    return cut, handle


def gather_tensor_on_last_rank(
    input_: Any, process_group: Any = None, async_op: bool = False
) -> tuple[Any, Any]:
    """Gather along the first dimension; only the last rank of the group gets the tensor.

    Returns:
        The gathered tensor on the last rank, None elsewhere; and the handle of the collective, as
        from `gather_along_first_dim`.
    """
    gathered, handle = gather_along_first_dim(input_, process_group, async_op)
    distributed = _distributed()
    if distributed is None:
        return gathered, handle
    last = distributed.get_world_size(process_group) - 1
    return (gathered if distributed.get_rank(process_group) == last else None), handle


def append_parent_docstring(parent: type) -> Callable[[_Class], _Class]:
    """Return a class decorator that appends the docstring of `parent` to that of the class."""

    def append(cls: _Class) -> _Class:
        cls.__doc__ = "\n".join(text for text in (cls.__doc__, parent.__doc__) if text)
        return cls

    return append


def warn_user(text: str) -> None:
    """Issue a UserWarning at the line of the program that called the debugger or a layer."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _PASSED_BY


def printable(value: object) -> str:
    """Return a value as text; characters that UTF-8 cannot encode (in file names) are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def integer(op: str, argument: str, value: Any) -> int:
    """Convert an integer of any library to Python's int.

    Raises:
        TypeError: `value` is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        got = type(value).__name__
        raise TypeError(f"[{op}] expected {argument} as an integer, got {got}") from None


def frequency(op: str, value: Any) -> int:
    """Convert the argument `freq`: every how many iterations something happens.

    Raises:
        TypeError: `value` is no integer.
        ValueError: It is below 1.
    """
    freq = integer(op, "freq", value)
    if freq < 1:
        raise ValueError(f"[{op}] expected freq of 1 or more, got {freq}")
    return freq


def step_number(op: str, argument: str, value: Any) -> int:
    """Convert the number of an iteration.

    Raises:
        TypeError: `value` is no integer.
        ValueError: It is negative, or 2^40 or more.
    """
    number = integer(op, argument, value)
    if not 0 <= number < 1 << 40:
        raise ValueError(f"[{op}] expected {argument} from 0 to 2^40 - 1, got {number}")
    return number


def refuse_misspelt(op: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for unknown keywords that look like misspelt or shortened known ones.

    Other unknown keywords are accepted: programs for other versions pass them.
    """
    for name in unknown:
        near = difflib.get_close_matches(name, list(known), 1, _MISSPELT)
        near += [whole for whole in known if whole.startswith(name)]
        if near:
            raise TypeError(f"[{op}] argument {name} is not known; did you mean {near[0]}?")


def in_notebook() -> bool:
    """Return whether the program runs in the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def run_all(calls: Iterable[Callable[[], Any]]) -> None:
    """Make all calls, and then raise the first error of them."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
