"""`GroupedLinear` as an operation: the numbers of rows of the groups are an extra input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.module import grouped_linear
from transformer_engine.pytorch.ops.linear import kaiming
from transformer_engine.pytorch.ops.operation import FusibleOperation


class GroupedLinear(grouped_linear.GroupedLinear, FusibleOperation):
    """Applies `y_i = x_i . A_i^T + b_i` to each group `x_i` of the rows of the input.

    It takes an extra input, the number of rows of each group. Weights are initialised like that of
    `torch.nn.Linear`, biases to zero.

    Args:
        num_groups: number of groups.
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: learn additive biases.
        device: device of the parameters; None is cuda where there is one, else cpu; `"meta"` defers
            initialisation to `reset_parameters`.
        dtype: dtype of the parameters; None is torch's default dtype.
        rng_state_tracker_function: returns the tracker under which weights are initialised.
        accumulate_into_main_grad: add the gradients of weights to their `main_grad`.
        delay_wgrad_compute: see `transformer_engine.pytorch.Linear`.
        name: for messages, reports and the debugger.

    Attributes:
        weight0, weight1, ...: `[out_features, in_features]`, one of each group.
        bias0, bias1, ...: `[out_features]`, likewise.

    Raises:
        ValueError: no groups, or invalid sizes.
        TypeError: sizes that are not ints, or invalid dtypes.

    >>> import torch
    >>> GroupedLinear(2, 16, 32, device="cpu")(torch.ones(5, 16), [3, 2]).shape
    torch.Size([5, 32])
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_groups,
            in_features,
            out_features,
            bias,
            init_method=kaiming,
            get_rng_state_tracker=rng_state_tracker_function,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
            device=device,
            dtype=dtype,
            name=name,
        )
        self.num_groups = num_groups

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, split_sizes: Sequence[int] | torch.Tensor
    ) -> torch.Tensor:
        """Apply each group's transformation to its rows.

        Args:
            x: `(..., in_features)`; its leading sizes count as rows.
            split_sizes: `[num_groups]`, how many rows each group has, in order; it may be zero. The
                host waits for a tensor on a GPU.

        Returns:
            `(..., out_features)`.

        Raises:
            ValueError: `split_sizes` has not one number for each group, or they do not add up.
            TypeError: an FP8 tensor as input; numbers of rows that are not ints.
        """
        return super().forward(x, split_sizes)
