"""`initialize_ub`, which must be called before layers whose `ub_*` arguments ask for overlap.

The name is NVIDIA's, for buffers that its kernels share between ranks. Here it checks its arguments
and records the number of ranks; see `parallel.overlap`.
"""

from __future__ import annotations

import difflib
import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.parallel.groups import TensorParallel
from transformer_engine.pytorch.parallel.overlap import Overlap


class UserBufferQuantizationMode(enum.Enum):
    """What collectives send: activations in high precision, or their FP8 codes.

    >>> [mode.name for mode in UserBufferQuantizationMode]
    ['NONE', 'FP8']
    """

    NONE = "none"
    FP8 = "fp8"


@dataclass
class UserBuffers:
    """The number of ranks of `initialize_ub`, and the layers that have run since.

    Attributes:
        tp_size: how many ranks share a layer.
        layers: for each layer that has run, the collectives that it asks to overlap.
    """

    tp_size: int
    layers: dict[str, Overlap] = field(default_factory=dict)


_GEMMS = [
    f"{part}_{g}" for part in ("qkv", "proj", "fc1", "fc2") for g in ("fprop", "dgrad", "wgrad")
]
_SETTINGS: dict[str, type | tuple[str, ...]] = {
    "method": ("ring_exchange", "pipeline", "bulk", "external"),
    "is_reduce_scatter": bool,
    "num_sm": int,
    "cga_size": int,
    "set_sm_margin": bool,
    "num_splits": int,
    "aggregate": bool,
    "atomic_gemm": bool,
    "use_ce": bool,
    "fp8_buf": bool,
    "comm_priority": int,
    "gemm_priority": int,
    "pipeline_rs_overlap_first_gemm": bool,
}
_BACKENDS = (None, "nccl", "gloo", "mpi")


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Let layers whose `ub_*` arguments ask for overlap run, until `destroy_ub`.

    Call it on all ranks, after `init_process_group` and before the first forward of such layers.

    Args:
        shape: shape of the largest tensor that is sent: `[tokens of all ranks, features]`.
        tp_size: how many ranks share a layer.
        use_fp8: FP8 codes are sent, too; `quantization_modes` says the same.
        quantization_modes: what is sent, a list of `UserBufferQuantizationMode`.
        dtype: fp32, fp16 or bf16: the dtype of tensors that are not sent as FP8 codes.
        ub_cfgs: settings of single collectives, by `<part>_<gemm>` (`qkv`, `proj`, `fc1`, `fc2`;
            `fprop`, `dgrad`, `wgrad`); or a list of such mappings, one for each mode. They are
            checked, but have no effect.
        bootstrap_backend: `nccl`, `gloo`, `mpi` or None. It is checked, but has no effect:
            collectives use the process group of the layers.
        with_cublasmp: without effect.

    Raises:
        RuntimeError: torch.distributed is not initialised; or `initialize_ub` was called before,
            without `destroy_ub`.
        ValueError: invalid sizes, modes or settings.
        TypeError: arguments of other types.

    Example:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> initialize_ub([4096, 1024], tp_size=1, dtype=torch.bfloat16)
        >>> destroy_ub()
        >>> dist.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "[initialize_ub] expected torch.distributed.init_process_group before it, got none"
        )
    if process_state().user_buffers is not None:
        raise RuntimeError("[initialize_ub] expected destroy_ub before a second call, got none")
    modes = _count_modes(use_fp8, quantization_modes)
    ranks = _size("tp_size", tp_size)
    if dist.get_world_size() % ranks:
        raise ValueError(
            f"[initialize_ub] expected tp_size to divide the {dist.get_world_size()} ranks, got"
            f" {ranks}"
        )
    if dtype not in HIGH_PRECISION:
        raise ValueError(
            f"[initialize_ub] expected dtype float32, float16 or bfloat16, got {dtype}"
        )
    if bootstrap_backend not in _BACKENDS:
        raise ValueError(
            f"[initialize_ub] expected bootstrap_backend in {_BACKENDS}, got {bootstrap_backend!r}"
        )
    _check_bool("with_cublasmp", with_cublasmp)
    _check_shape(shape, ranks)
    _check_configs(ub_cfgs, modes)
    process_state().user_buffers = UserBuffers(ranks)


def destroy_ub() -> None:
    """Undo `initialize_ub`; does nothing if that was not called.

    >>> destroy_ub()
    """
    process_state().user_buffers = None


def note_layer(ranks: TensorParallel) -> None:
    """Record a layer that asks for overlap, before its first call; others are ignored.

    Raises:
        RuntimeError: `initialize_ub` was not called.
        ValueError: it was called for another number of ranks.
    """
    if not any(ranks.overlap):
        return
    buffers = process_state().user_buffers
    if buffers is None:
        raise RuntimeError(
            f"[{ranks.op}] expected initialize_ub before the first forward of a layer whose ub_* "
            f"arguments ask for overlap ({ranks.overlap}), got none (layer {ranks.layer})"
        )
    if buffers.tp_size != ranks.size:
        raise ValueError(
            f"[{ranks.op}] expected initialize_ub with tp_size={ranks.size}, got"
            f" {buffers.tp_size} (layer {ranks.layer})"
        )
    buffers.layers[ranks.layer] = ranks.overlap


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"[initialize_ub] expected {name} to be True or False, got {value!r}")


def _size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError as error:
        raise TypeError(f"[initialize_ub] expected {name} to be an int, got {value!r}") from error
    if size < 1:
        raise ValueError(f"[initialize_ub] expected {name} >= 1, got {size}")
    return size


def _check_shape(shape: Any, ranks: int) -> None:
    sizes = list(shape) if isinstance(shape, Iterable) else []
    if len(sizes) != 2:
        raise ValueError(
            f"[initialize_ub] expected shape [tokens of all ranks, features], got {shape!r}"
        )
    tokens, _ = (_size("each size of shape", size) for size in sizes)
    if tokens % ranks:
        raise ValueError(
            f"[initialize_ub] expected tokens that {ranks} ranks can share, got {tokens} in shape"
        )


def _count_modes(use_fp8: Any, modes: Any) -> int:
    _check_bool("use_fp8", use_fp8)
    if modes is None:
        return 1
    found = list(modes) if isinstance(modes, Iterable) else [modes]
    if not found or not all(isinstance(mode, UserBufferQuantizationMode) for mode in found):
        raise TypeError(
            "[initialize_ub] expected quantization_modes to be a list of UserBufferQuantizationMode"
            f", got {modes!r}"
        )
    return len(found)


def _check_configs(configs: Any, modes: int) -> None:
    listed = [{}] if configs is None else configs if isinstance(configs, list) else [configs]
    if isinstance(configs, list) and len(listed) != modes:
        raise ValueError(
            f"[initialize_ub] expected one mapping in ub_cfgs for each of {modes} modes, got"
            f" {len(listed)}"
        )
    for mapping in listed:
        if not isinstance(mapping, Mapping):
            raise TypeError(f"[initialize_ub] expected ub_cfgs to be a mapping, got {mapping!r}")
        for name, settings in mapping.items():
            _known(name, _GEMMS, "ub_cfgs to name collectives")
            for key, value in settings.items():
                _check_setting(name, key, value)


def _known(name: Any, known: Iterable[str], what: str) -> None:
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(str(name), names, 1)
        hint = f" (did you mean {near[0]}?)" if near else f", one of {', '.join(names)}"
        raise ValueError(f"[initialize_ub] expected {what}, got {name!r}{hint}")


def _check_setting(collective: str, key: str, value: Any) -> None:
    _known(key, _SETTINGS, f"known settings of {collective}")
    kind = _SETTINGS[key]
    if isinstance(kind, tuple):
        _known(value, kind, f"{key} of {collective} to be known")
    elif kind is bool and value not in (False, True):  # files say 0 and 1, too
        raise ValueError(
            f"[initialize_ub] expected {key} of {collective} to be True or False, got {value!r}"
        )
    elif kind is int and not isinstance(value, int):
        raise ValueError(
            f"[initialize_ub] expected {key} of {collective} to be an int, got {value!r}"
        )
