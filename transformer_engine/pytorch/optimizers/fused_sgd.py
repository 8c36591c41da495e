"""`FusedSGD`: `torch.optim.SGD` under the argument names of older programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from transformer_engine.pytorch.optimizers.arguments import refuse_others


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD(fused=True)`; without the fused kernel for DTensors, which it cannot take.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: factor of the earlier steps.
        dampening: of the gradient that is added to them.
        weight_decay: factor of the parameter that is added to the gradient.
        nesterov: Nesterov's momentum.
        wd_after_momentum: False.
        materialize_master_grads: has no effect.
        set_grad_none: of older versions; None or True.

    Raises:
        NotImplementedError: other values of these arguments.
        ValueError: see `torch.optim.SGD`.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> FusedSGD([weight], lr=0.25).step()
    >>> weight.data
    tensor([0.7500, 0.7500])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse_others(
            "FusedSGD",
            wd_after_momentum=(wd_after_momentum, False),
            set_grad_none=(set_grad_none is not False, True),
        )
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov=nesterov, fused=True
        )
        for group in self.param_groups:
            if any(hasattr(parameter, "device_mesh") for parameter in group["params"]):
                group["fused"] = False
