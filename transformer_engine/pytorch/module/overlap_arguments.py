"""The `ub_*` arguments of modules, in old and new names, and others that tune communication.

They ask that a collective of tensor parallelism overlaps with the GEMM beside it. The arguments
become an `Overlap`, which the stages of the chain read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from transformer_engine.pytorch.module.arguments import refuse_keywords, refuse_others
from transformer_engine.pytorch.parallel.overlap import NO_OVERLAP, Overlap, OverlapArguments

_GATHERS = ("ub_overlap_ag", "ub_split_ag", "ub_atomic_gemm_ag")
_SCATTERS = ("ub_overlap_rs", "ub_split_rs", "ub_atomic_gemm_rs")
_SCATTERS_GRADS = "ub_overlap_rs_dgrad"
_SWITCH = "ub_tp_comm_overlap"  # of a TransformerLayer
# These have no effect: in any case dgrad's collective runs during the GEMM of wgrad, and the input
# is gathered again during the GEMM of dgrad.
_ALWAYS = ("ub_bulk_dgrad", "ub_bulk_wgrad")
# Attributes of modules that show the fields of `Overlap`, in the same order.
_ATTRIBUTES = (
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_dgrad",
)
_FLAGS = frozenset({*_GATHERS, *_SCATTERS, _SCATTERS_GRADS, *_ALWAYS, _SWITCH})
_NAMES = frozenset({"ub_name", "rng_tracker_name", "symmetric_ar_type"})

# Keywords of newer versions of the API, with the only value that is implemented.
_LATER = {"delay_wgrad_compute": False}


def overlap_arguments(
    module: type[nn.Module], others: dict[str, Any], whole: bool = False
) -> OverlapArguments:
    """Check the further keywords of a constructor, and return those about overlap.

    Args:
        module: the class.
        others: its further keywords.
        whole: the module is a layer with the switch `ub_tp_comm_overlap`, which is the default of
            the `ub_*` flags that are not given.

    Raises:
        TypeError: unknown keywords, or values of other types.
        NotImplementedError: a keyword with a value that is not implemented.
    """
    kind = module.__name__
    known = (_FLAGS if whole else _FLAGS - {_SWITCH}) | _NAMES | _LATER.keys()
    if set(others) - known:
        refuse_keywords(module, set(others) - known, known)
    refuse_others(kind, None, others, _LATER)
    for name, value in others.items():
        if name in _FLAGS and not isinstance(value, bool):
            raise TypeError(f"[{kind}] expected {name} to be True or False, got {value!r}")
        if name in _NAMES and not (value is None or isinstance(value, str)):
            raise TypeError(f"[{kind}] expected {name} to be a str or None, got {value!r}")
    if whole and not others.get(_SWITCH, False):
        return OverlapArguments()

    def asked(*names: str) -> bool:
        flags = [others[name] for name in names if name in others]
        return any(flags) if flags else whole

    grads = bool(others.get(_SCATTERS_GRADS, False))
    return OverlapArguments(asked(*_GATHERS), asked(*_SCATTERS), grads, others.get("ub_name"))


def keep_overlap(
    module: Any, asked: OverlapArguments, others: dict[str, Any], *modes: str | None
) -> None:
    """Keep the `ub_*` arguments of a module, also as the attributes that trainers read.

    The module's `sequence_parallel` is set already; `asked` is what `overlap_arguments` returned,
    and `modes` are the `parallel_mode` of each GEMM of the module.
    """
    module._overlap_asked, module.ub_name = asked, asked.name
    module.ub_overlap_ag, module.ub_overlap_rs = asked.gathers, asked.scatters
    flags = zip(_ATTRIBUTES, _wanted(module, asked, modes), strict=True)
    vars(module).update(flags, **{name: others.get(name, False) for name in _ALWAYS})


def _wanted(module: Any, asked: OverlapArguments, modes: Sequence[str | None]) -> Overlap:
    """The collectives that will overlap; none without sequence parallelism."""
    if not module.sequence_parallel:
        return NO_OVERLAP
    return asked.overlap("column" in modes, "row" in modes)


def request_overlap(module: Any, *modes: str | None, named: bool = False) -> None:
    """Tell the ranks of a module whether they share tokens, and which collectives overlap.

    Call it after `keep_overlap`, with the same `modes`. If `named`, `ub_name` is required where
    anything overlaps.

    Raises:
        ValueError: `ub_name` is missing.
    """
    ranks, asked = module.ranks, module._overlap_asked
    wanted = _wanted(module, asked, modes)
    if any(wanted) and named and not asked.name:
        raise ValueError(
            f"[{ranks.op}] expected ub_name ('qkv', 'proj', 'fc1' or 'fc2') with ub_* arguments"
            f" that ask for overlap ({wanted}), got none (layer {ranks.layer})"
        )
    ranks.sequence, ranks.overlap = module.sequence_parallel, wanted
