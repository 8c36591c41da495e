"""`FusedSGD`: `torch.optim.SGD` under the argument names of older programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.sgd import sgd

from transformer_engine.pytorch.module.arguments import refuse_others
from transformer_engine.pytorch.optimizers.arguments import loss_of
from transformer_engine.pytorch.optimizers.parts import refuse_slice
from transformer_engine.pytorch.tensor.shards import piece_of

_MOMENTUM = "momentum_buffer"  # as torch's states call it
_SETTINGS = (
    "weight_decay",
    "momentum",
    "lr",
    "dampening",
    "nesterov",
    "maximize",
    "foreach",
    "fused",
)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD(fused=True)`.

    A group is stepped without the fused kernel if it has DTensors, complex parameters or parameters
    that are not contiguous, which the kernel does not support, or 16-bit parameters on a CPU, most
    of whose values the kernel leaves unchanged.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: factor of the momentum of earlier steps.
        dampening: gradients are multiplied by `1 - dampening` when they are added to the momentum.
        weight_decay: factor of the parameter that is added to the gradient.
        nesterov: use Nesterov's momentum.
        wd_after_momentum: must be False.
        materialize_master_grads: has no effect.
        set_grad_none: argument of older versions; must be None or True.

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
        others = {
            "wd_after_momentum": wd_after_momentum,
            "set_grad_none": set_grad_none is not False,
        }
        only = {"wd_after_momentum": False, "set_grad_none": True}
        refuse_others("FusedSGD", None, others, only)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov=nesterov)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
        return all(map(_takes_fused, self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients again.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: sparse gradients, in groups that the fused kernel steps.
            NotImplementedError: a slice of an FP8 weight, if there are several processes.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            # At each step, because a conversion of the module changes the parameters.
            group["fused"], group["foreach"] = _takes_fused(group), None
            # In one call of the fused kernel, all parameters must have a momentum, or none.
            new: list[torch.Tensor] = []
            known: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state.get(parameter, {}).get(_MOMENTUM)
                    (new if momentum is None else known).append(parameter)
            if new and group["momentum"] != 0 and self._is_skipped():
                continue
            for members in (new, known):
                if members:
                    self._step(group, members)
        return loss

    def _is_skipped(self) -> bool:
        """Whether `GradScaler` has found a gradient that is not finite; waits for the device.

        The fused kernel writes nothing then: new momenta would be whatever the memory held.
        """
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Step parameters that all have momenta, or none of them."""
        for parameter in parameters:
            refuse_slice(piece_of(parameter), "FusedSGD")
        has_momenta = group["momentum"] != 0
        states = [self.state[parameter] for parameter in parameters] if has_momenta else []
        momenta = [state.get(_MOMENTUM) for state in states]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        sgd(
            parameters,
            gradients,
            momenta,
            has_sparse_grad=any([gradient.is_sparse for gradient in gradients]),
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            **{name: group[name] for name in _SETTINGS},
        )
        if group["fused"]:
            torch.autograd.graph.increment_version(parameters)  # torch's kernel does not
        for state, momentum in zip(states, momenta, strict=True):
            state[_MOMENTUM] = momentum


def _takes_fused(group: dict[str, Any]) -> bool:
    return all(map(_fused_steps, group["params"]))


def _fused_steps(parameter: torch.Tensor) -> bool:
    """Whether the fused kernel supports a parameter and steps it correctly (torch issue 191763)."""
    if not parameter.is_floating_point():
        return False
    small_on_cpu = parameter.device.type == "cpu" and parameter.itemsize < 4
    return not (small_on_cpu or hasattr(parameter, "device_mesh") or not parameter.is_contiguous())
