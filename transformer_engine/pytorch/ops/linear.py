"""A product with a weight, and a bias, as operations of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.dtypes import in_autocast_dtype
from transformer_engine.pytorch.module.arguments import check_sizes
from transformer_engine.pytorch.module.inputs import refuse_input
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.parameters import (
    ParameterSet,
    ParameterSpec,
    params_dtype_of,
)
from transformer_engine.pytorch.ops.operation import FusibleOperation

_kaiming = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))


class BasicLinear(Linear, FusibleOperation):
    """`y = x . A^T`, in FP8 under `autocast`; the weight starts as that of `torch.nn.Linear`.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        device: of the weight; None is cuda where there is one, else cpu; `"meta"` defers.
        dtype: of the weight; None is torch's default dtype.
        tensor_parallel_mode: None, `"column"` or `"row"`.
        tensor_parallel_group: of one rank so far.
        sequence_parallel: has an effect with several ranks only.
        rng_state_tracker_function: returns the tracker under which the weight is initialised.
        accumulate_into_main_grad: add the weight's gradient to `weight.main_grad`.
        userbuffers_options: has an effect with several ranks only.
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
            init_method=_kaiming,
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
        size: of the last axis.
        device: of the bias; None is cuda where there is one, else cpu; `"meta"` defers.
        dtype: of the bias; None is torch's default dtype.

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
    ) -> None:
        super().__init__()
        self.size = size
        self._parameter_set = ParameterSet(None)
        check_sizes("Bias", None, size=size)
        spec = ParameterSpec("bias", (size,), nn.init.zeros_)
        self._parameter_set.create(self, [spec], params_dtype_of(None, dtype), device)

    def reset_parameters(self) -> None:
        """Start at zero; a bias on meta gets memory first."""
        self._parameter_set.reset(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the bias, in the dtype of `x`, or of `torch.autocast` where that is active.

        Args:
            x: `(..., size)`.
        """
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            refuse_input("Bias", "x", x, None)
        if x.ndim == 0 or x.shape[-1] != self.size:
            raise ValueError(f"[Bias] expected x of shape (..., {self.size}), got {tuple(x.shape)}")
        bias: torch.Tensor = self.bias  # type: ignore[assignment]
        x = in_autocast_dtype(x)
        return x + bias.to(x.dtype)

    def extra_repr(self) -> str:
        """The size."""
        return str(self.size)
