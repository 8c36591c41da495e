"""A product with a weight, a bias, and both in one, as operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.dtypes import in_autocast_dtype
from transformer_engine.pytorch.module import linear
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import check_floating
from transformer_engine.pytorch.module.parallel_mode import SharedLinear
from transformer_engine.pytorch.module.parameters import ParameterSet, params_dtype_of
from transformer_engine.pytorch.ops.operation import FusibleOperation
from transformer_engine.pytorch.parallel.groups import TensorParallel

kaiming = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))


class BasicLinear(linear.Linear, FusibleOperation):
    """`y = x . A^T`, in FP8 under `autocast`; initialised like the weight of `torch.nn.Linear`.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        device: device of the weight; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        dtype: dtype of the weight; None is torch's default dtype.
        tensor_parallel_mode: `"column"`: each rank has some of the outputs; `"row"`: each has some
            of the inputs, and outputs are summed over the ranks; None: the ranks do not share it.
        tensor_parallel_group: process group of these ranks; `in_features` and `out_features` are
            the sizes of the whole layer.
        sequence_parallel: each rank has a part of the tokens, along the first axis; they are
            gathered before a column-parallel product, and the sums of a row-parallel product are
            scattered.
        rng_state_tracker_function: returns the tracker under which the weight is initialised.
        accumulate_into_main_grad: add the weight's gradient to `weight.main_grad`.
        userbuffers_options: has no effect.
        name: for messages, reports and the debugger.

    >>> import torch
    >>> BasicLinear(16, 32, device="cpu")(torch.ones(4, 16)).shape
    torch.Size([4, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=False,
            init_method=kaiming,
            get_rng_state_tracker=rng_state_tracker_function,
            device=device,
            sequence_parallel=sequence_parallel,
            tp_group=tensor_parallel_group,
            parallel_mode=tensor_parallel_mode,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            dtype=dtype,
            name=name,
        )


class Linear(linear.Linear, FusibleOperation):
    """`y = x . A^T + b`: `BasicLinear` and `Bias` in one, with parameters `weight` and `bias`.

    The weight is initialised like that of `torch.nn.Linear`, the bias to zero.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: learn an additive bias; else `bias` is None.
        device: device of the parameters; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        dtype: dtype of the parameters; None is torch's default dtype.
        tensor_parallel_mode: see `BasicLinear`.
        tensor_parallel_group: see `BasicLinear`.
        sequence_parallel: see `BasicLinear`.
        rng_state_tracker_function: returns the tracker under which the weight is initialised.
        accumulate_into_main_grad: add the weight's gradient to `weight.main_grad`.
        userbuffers_options: has no effect.
        name: for messages, reports and the debugger.

    Raises:
        ValueError: invalid sizes or modes.
        TypeError: sizes that are not ints, or invalid dtypes.

    >>> import torch
    >>> Linear(16, 32, device="cpu")(torch.ones(4, 16)).shape
    torch.Size([4, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            init_method=kaiming,
            get_rng_state_tracker=rng_state_tracker_function,
            device=device,
            sequence_parallel=sequence_parallel,
            tp_group=tensor_parallel_group,
            parallel_mode=tensor_parallel_mode,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            dtype=dtype,
            name=name,
        )


class Bias(FusibleOperation):
    """`y = x + b`.

    Args:
        size: size of the last axis.
        device: device of the bias; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        dtype: dtype of the bias; None is torch's default dtype.
        tensor_parallel: each rank has its part of the bias, and of the last axis of inputs.
        tensor_parallel_group: process group of these ranks; `size` is the size of all parts.

    Raises:
        ValueError: a size below 1, or one that the ranks cannot share.
        TypeError: a size that is not an int, or not a process group.

    >>> import torch
    >>> Bias(16, device="cpu")(torch.ones(4, 16)).shape
    torch.Size([4, 16])
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        check_sizes("Bias", None, size=size)
        ranks = TensorParallel("Bias", "bias", tensor_parallel_group, 1)
        shared = SharedLinear("column" if tensor_parallel else None, ranks)
        self.size = shared.outputs("size", size)
        self._parameter_set = ParameterSet(None)
        specs = [shared.bias("bias", self.size)]
        self._parameter_set.create(self, specs, params_dtype_of(None, dtype), device)

    def reset_parameters(self) -> None:
        """Set the bias to zero; a bias on meta gets memory first."""
        self._parameter_set.reset(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the bias, in the dtype of `x`, or of `torch.autocast` where that is active.

        Args:
            x: `(..., size)`.
        """
        check_floating("Bias", x=x)
        if x.ndim == 0 or x.shape[-1] != self.size:
            raise ValueError(f"[Bias] expected x of shape (..., {self.size}), got {tuple(x.shape)}")
        bias: torch.Tensor = self.bias  # type: ignore[assignment]
        x = in_autocast_dtype(x)
        return x + bias.to(x.dtype)

    def extra_repr(self) -> str:
        """The size."""
        return str(self.size)
