"""Checks of the arguments that constructors of modules share."""

from __future__ import annotations

import difflib
import inspect
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from transformer_engine.pytorch.parallel.groups import TensorParallel, check_group


def check_sizes(module: str, layer: str | None, least: int = 1, /, **sizes: Any) -> None:
    """Raise unless every argument is an int of at least `least`."""
    for name, size in sizes.items():
        try:
            small = operator.index(size) < least
        except TypeError as error:
            raise TypeError(
                f"[{module}] expected {name} to be an int, got {size!r}{_where(layer)}"
            ) from error
        if small:
            raise ValueError(f"[{module}] expected {name} >= {least}, got {size}{_where(layer)}")


def check_numbers(module: str, layer: str | None, /, **values: Any) -> None:
    """Raise TypeError unless every argument is a real number."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"[{module}] expected {name} to be a number, got {value!r}{_where(layer)}"
            )


def _where(layer: str | None) -> str:
    return f" (layer {layer})" if layer else ""


def refuse_keywords(module: Callable[..., Any], unknown: Iterable[str]) -> NoReturn:
    """Raise TypeError for unknown keywords of a constructor, with the nearest known one."""
    known = [name for name in inspect.signature(module).parameters if name != "others"]
    described = []
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, 1)
        described.append(f"{name} (did you mean {near[0]}?)" if near else name)
    raise TypeError(
        f"{module.__name__}() got unexpected keyword argument(s) {', '.join(described)}"
    )


def refuse_parallelism(module: nn.Module, argument: str, group: Any) -> None:
    """Raise unless a group has one rank: several are not implemented for this module."""
    kind, layer = type(module).__name__, str(module.name)
    check_group(kind, argument, group, layer)
    if group is None:
        return
    size = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    if size > 1:
        raise NotImplementedError(
            f"[{kind}] {argument} with {size} ranks is not implemented yet; a group of one rank "
            f"is accepted (layer {layer})"
        )


def refuse_parallel_sizes(module: nn.Module, tp_group: Any = None, tp_size: int = 1) -> None:
    """Tensor parallel arguments are accepted as long as they mean one rank."""
    refuse_parallelism(module, "tp_group", tp_group)
    kind = type(module).__name__
    check_sizes(kind, str(module.name), 1, tp_size=tp_size)
    if tp_size > 1:
        raise NotImplementedError(
            f"[{kind}] tp_size={tp_size}: tensor parallelism is not implemented yet (layer "
            f"{module.name})"
        )


def tensor_parallel(
    module: Any, tp_group: Any, tp_size: int, sequence_parallel: bool, shared: bool = True
) -> TensorParallel:
    """The ranks that these arguments of a constructor name; this one alone unless `shared`.

    Raises:
        TypeError: no process group, or no sizes.
        ValueError: a group of another size.
    """
    kind = type(module).__name__
    check_sizes(kind, str(module.name), 1, tp_size=tp_size)
    ranks = TensorParallel(kind, module.name, tp_group, tp_size, sequence_parallel)
    return ranks if shared else TensorParallel(kind, module.name, None, 1)


# Keywords of other versions that only tune communication between several ranks.
_OVERLAP_ARGUMENTS = frozenset(
    {
        "ub_atomic_gemm_ag",
        "ub_atomic_gemm_rs",
        "ub_bulk_dgrad",
        "ub_bulk_wgrad",
        "ub_name",
        "ub_overlap_ag",
        "ub_overlap_rs",
        "ub_overlap_rs_dgrad",
        "ub_split_ag",
        "ub_split_rs",
        "ub_tp_comm_overlap",
        "rng_tracker_name",
        "symmetric_ar_type",
    }
)

# Keywords of newer versions, and what they may be so far.
_LATER = {"activation_params": None, "delay_wgrad_compute": False}


def accept_overlap_arguments(module: type[nn.Module], others: dict[str, Any]) -> None:
    """Ignore arguments that tune multi-rank overlap; refuse anything else by name."""
    unknown = set(others) - _OVERLAP_ARGUMENTS - _LATER.keys()
    if unknown:
        refuse_keywords(module, unknown)
    for name in others.keys() & _LATER.keys():
        if others[name] != _LATER[name]:
            raise NotImplementedError(
                f"[{module.__name__}] {name}={others[name]!r} is not implemented yet, only "
                f"{_LATER[name]!r} is"
            )
