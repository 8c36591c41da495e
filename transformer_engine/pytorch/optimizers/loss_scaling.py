"""Steps of `FusedAdam` under a `torch.amp.GradScaler`.

The scaler multiplies the loss by a scale, so gradients have to be divided by it, and a step with an
infinite gradient has to be skipped. Both happen in the kernel of the step where that is possible.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from transformer_engine.pytorch.optimizers.on_device import device_count
from transformer_engine.pytorch.parallel.dtensors import whole_value

F = TypeVar("F", bound=Callable[..., Any])


def hides_scaler(step: F) -> F:
    """Hide `grad_scaler` in a step's signature, because `GradScaler.step` warns if it sees one."""
    signature = inspect.signature(step)
    shown = [one for name, one in signature.parameters.items() if name != "grad_scaler"]
    step.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return step


def forgets_scale(step: F) -> F:
    """Remove what `GradScaler.step` has set if a step raises: the scaler itself does not then.

    Otherwise later steps would divide gradients by that scale, too.
    """

    @functools.wraps(step)
    def call(optimizer: Any, *args: Any) -> Any:
        try:
            return step(optimizer, *args)
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
            raise

    return call  # type: ignore[return-value]


def takes_scaled(optimizer: Any) -> bool:
    """Whether `GradScaler.step` leaves unscaling, and the response to inf, to the optimizer's step.

    Otherwise the scaler unscales gradients first, which it refuses for fp16, and waits for the
    device.
    """
    if optimizer.capturable or optimizer.use_decoupled_grad:
        return True
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any([p.grad is not None and p.grad.dtype is torch.float16 for p in parameters])


def step_by(scaler: Any, optimizer: Any, closure: Any, step: Callable[[], Any]) -> Any:
    """Call `scaler.step(optimizer)` from within `optimizer.step(grad_scaler=...)`.

    Meanwhile `optimizer.step` is replaced by `step`, because the hooks of the outer step have run.

    Raises:
        TypeError: a scaler of another kind.
        NotImplementedError: a closure, whose gradients the scaler has not seen.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"[FusedAdam] expected grad_scaler to be a torch.amp.GradScaler or None, got {scaler!r}"
        )
    if closure is not None:
        raise NotImplementedError(
            "[FusedAdam] expected closure=None with a grad_scaler, which looks for inf in the "
            f"gradients before the step, got {closure!r}"
        )
    own = vars(optimizer)
    outer = own.get("step")  # a wrapper that a learning rate scheduler has set
    own["step"] = step
    try:
        return scaler.step(optimizer)
    finally:
        del own["step"]
        if outer is not None:
            own["step"] = outer


def scaling_of(
    optimizer: Any, grad_factor: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The factor of gradients, which includes 1 / scale, and `found_inf`; both fp32 `[]`, or None.

    `GradScaler.step` sets the scale and `found_inf` as attributes of the optimizer: no scale if
    gradients are unscaled already, and the number 0 for `found_inf` if it saw no gradients.

    Raises:
        NotImplementedError: gradients are in `decoupled_grad`, where the scaler does not look.
    """
    scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    if found_inf is not None and optimizer.use_decoupled_grad:
        raise NotImplementedError(
            "[FusedAdam] expected gradients in parameter.grad with a GradScaler, which looks for"
            " inf there, got use_decoupled_grad=True"
        )
    factor = None if grad_factor is None else whole_value(grad_factor).float().reshape(())
    if scale is not None:
        inverse = scale.double().reciprocal().float().reshape(())
        factor = inverse if factor is None else factor * inverse.to(factor.device)
    if not isinstance(found_inf, torch.Tensor):
        return factor, None
    return factor, found_inf.float().reshape(())


def count_step(
    group: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    capturable: bool,
    found_inf: torch.Tensor | None,
) -> None:
    """Count a step of a group; with `capturable` on the device, and only if nothing overflowed.

    Args:
        group: a group of the optimizer. On a rank it may have no parameters: its step is counted
            on a device that other groups have.
        groups: all groups of the optimizer.
        capturable: see `FusedAdam`.
        found_inf: not 0 after an overflow, on any device; or None.

    Raises:
        ValueError: `capturable`, and parameters on several devices.
    """
    if not capturable:
        group["step"] = int(group.get("step", 0)) + 1
        return
    devices = {parameter.device for parameter in group["params"]}
    if len(devices) > 1:
        raise ValueError(
            "[FusedAdam] expected a group's parameters on one device with capturable=True, got "
            f"{', '.join(sorted(map(str, devices)))}"
        )
    count = group.get("step", 0)
    if not devices:
        others = [parameter for one in groups for parameter in one["params"]]
        known = [x for x in (*others, found_inf, count) if isinstance(x, torch.Tensor)]
        devices = {known[0].device if known else torch.device("cpu")}
    device = devices.pop()
    group["step"] = device_count(count, device)
    group["step"] += 1 if found_inf is None else found_inf.to(device) == 0
