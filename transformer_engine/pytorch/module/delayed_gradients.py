"""Gradients of weights and biases that `backward_dw` computes, some time after the backward.

Pipeline schedules use this to fill idle time: the backward computes only the gradient of the input,
which the previous stage waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.chain.chain import Chain


class DelaysGradients:
    """Base of modules with `delay_wgrad_compute`.

    Attributes:
        delay_wgrad_compute: the backward does not compute the gradients of weights, and of biases
            that are added by GEMMs: `backward_dw` does.
    """

    chain: Chain
    name: str
    _parameters: dict[str, Any]
    delay_wgrad_compute = False
    _hooks_of_gradients: tuple[Callable[[], Any], ...] = ()

    def gemm_parameters(self) -> Sequence[tuple[Sequence[str], Sequence[str]]]:
        """Names of the weights, and of the biases, of each GEMM; those of parts are in order."""
        raise NotImplementedError

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` must be called; the same as `delay_wgrad_compute`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the gradients that the oldest backward left, and add them to `.grad`.

        With `fuse_wgrad_accumulation` those of weights go into `main_grad`. Does nothing without
        `delay_wgrad_compute`.

        Raises:
            RuntimeError: no backward has left gradients; or a parameter was replaced.
        """
        if not self.need_backward_dw():
            return
        with torch.no_grad():
            self._compute_delayed()
        for hook in self._hooks_of_gradients:
            hook()

    def _compute_delayed(self) -> None:
        for matmul, names in reversed(
            [*zip(self.chain.matmuls, self.gemm_parameters(), strict=True)]
        ):
            if not matmul.delayed:
                if self._trains(names[0]):
                    raise RuntimeError(
                        f"[{type(self).__name__}] expected a backward before each backward_dw, got "
                        f"none (layer {self.name})"
                    )
                continue
            for whole, parts in zip(matmul.delayed.pop(0).gradients(), names, strict=False):
                if whole is not None:
                    self._add(whole, parts)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Let `backward_dw` call this, without arguments, when it is done."""
        self._hooks_of_gradients = (*self._hooks_of_gradients, hook)

    def _trains(self, names: Iterable[str]) -> bool:
        found = [self._parameters.get(name) for name in names]
        return any([p is not None and p.requires_grad for p in found])

    def _add(self, whole: torch.Tensor, names: Sequence[str]) -> None:
        """Split the gradient of a whole weight or bias, and add each part to its parameter's."""
        parameters = [self._own(name) for name in names]
        parts = whole.split([p.shape[0] for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if not parameter.requires_grad:
                continue
            grad = part.to(parameter.dtype)
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad

    def _own(self, name: str) -> torch.Tensor:
        own = self._parameters.get(name)
        if own is None or hasattr(own, "device_mesh"):
            kind = "nothing" if own is None else type(own).__name__
            raise RuntimeError(
                f"[{type(self).__name__}] expected {name} to be the parameter of which "
                f"delay_wgrad_compute=True delays the gradient, got {kind}: a weight that is "
                f"computed or cut has its gradient from the backward alone (layer {self.name})"
            )
        return own
