"""`FusedAdam`: Adam in fp32, whatever the dtype of the parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.optimizers.arguments import refuse_others
from transformer_engine.pytorch.optimizers.on_device import device_count, step_on_device
from transformer_engine.pytorch.optimizers.states import check_shapes, portions, steps_of_groups
from transformer_engine.pytorch.optimizers.stored_states import STATES, StoredStates
from transformer_engine.pytorch.parallel.dtensors import local_part
from transformer_engine.pytorch.tensor.shards import initial_value, piece_of, with_piece
from transformer_engine.pytorch.tensor.writing import write

_FUSED = ("cpu", "cuda")
_SETTINGS = ("adam_w_mode", "capturable", "master_weights", "use_decoupled_grad", "_stored")
_MOST_VALUES = 2**26  # of states that are in fp32 at once


class FusedAdam(torch.optim.Optimizer):
    """Adam with states in fp32, by torch's fused kernels, or with `capturable` by one of ours.

    Steps of 16-bit and FP8 parameters are computed in fp32 and rounded at the end, or on fp32
    master weights. `group["step"]` counts the steps.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root.
        weight_decay: factor of the parameter in the step.
        amsgrad: False.
        bias_correction: True.
        adam_w_mode: weight decay as in `torch.optim.AdamW`; else it is added to the gradient.
        capturable: count steps on the device, so that a step can be captured in a CUDA graph, after
            one step before the capture. Replays read the learning rate if it is a tensor. One
            kernel reads and writes each value once, whatever its dtype.
        master_weights: keep an fp32 copy of each parameter that is not in fp32, as `master_param`
            of its state. FP8 parameters need it; their copy starts with
            `get_high_precision_init_val()` if there is one.
        master_weight_dtype: float32, or float16 with a scale for each tensor.
        exp_avg_dtype: float32, bfloat16, or float16 or uint8 (FP8 E4M3) with a scale for each
            tensor. Steps are computed in fp32 whatever is stored.
        exp_avg_sq_dtype: likewise.
        use_decoupled_grad: gradients are in `parameter.decoupled_grad`.
        store_param_remainders: of fp32 master weights of bf16 parameters, keep the 16 bits that
            the parameters do not have.
        set_grad_none: of older versions; None or True.

    Raises:
        NotImplementedError: other values of these arguments.
        ValueError: numbers out of range.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> optimizer = FusedAdam([weight], lr=0.5, master_weights=True)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight.data, optimizer.get_unscaled_state(weight, "master_param").dtype
    (tensor([0.5000, 0.5000], dtype=torch.bfloat16), torch.float32)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse_others(
            "FusedAdam",
            amsgrad=(amsgrad, False),
            bias_correction=(bias_correction, True),
            set_grad_none=(set_grad_none is not False, True),
        )
        factors = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        if min(factors.values()) < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                "[FusedAdam] expected lr, eps and weight_decay of 0 or more and betas in [0, 1), "
                f"got {factors} and {betas}"
            )
        dtypes = dict(
            zip(STATES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        fp32_masters = master_weights and master_weight_dtype is torch.float32
        self._stored = StoredStates(dtypes, store_param_remainders and fp32_masters)
        self._stored.check(capturable)
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        super().__init__(params, {"betas": betas, **factors})

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_scaler: Any = None,
        grad_factor: torch.Tensor | None = None,
    ) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients again.
            grad_scaler: None; give the optimizer to the scaler's `step` instead.
            grad_factor: one value on the device by which gradients are multiplied, such as that of
                `clip_factor`.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: sparse gradients; FP8 parameters without `master_weights`; in a CUDA graph
                capture without `capturable`.
        """
        refuse_others("FusedAdam", grad_scaler=(grad_scaler, None))
        if is_capturing() and not self.capturable:
            raise RuntimeError(
                "[FusedAdam] expected capturable=True in a CUDA graph capture, whose replays would "
                "repeat the number of this step, got False"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if self._gradient(parameter) is not None:
                    by_device.setdefault(parameter.device, []).append(parameter)
            self._count(group)
            for device, parameters in by_device.items():
                self._step(group, parameters, device, grad_factor)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _SETTINGS}}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that steps read.

        Args:
            set_to_none: leave None, else zeros.
        """
        super().zero_grad(set_to_none)
        if not self.use_decoupled_grad:
            return
        for parameter in chain(*(group["params"] for group in self.param_groups)):
            gradient = self._gradient(parameter)
            if gradient is not None:
                parameter.decoupled_grad = None if set_to_none else torch.zeros_like(gradient)

    def _count(self, group: dict[str, Any]) -> None:
        if not self.capturable:
            group["step"] = int(group.get("step", 0)) + 1
            return
        devices = {parameter.device for parameter in group["params"]}
        if len(devices) > 1:
            raise ValueError(
                "[FusedAdam] expected a group's parameters on one device with capturable=True, got "
                f"{', '.join(sorted(map(str, devices)))}"
            )
        for device in devices:
            group["step"] = device_count(group.get("step", 0), device)
            group["step"] += 1

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self.use_decoupled_grad:
            return getattr(parameter, "decoupled_grad", None)
        return parameter.grad

    def _step(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        device: torch.device,
        factor: torch.Tensor | None,
    ) -> None:
        gradients: list[Any] = [self._gradient(parameter) for parameter in parameters]
        if not all(gradient.layout is torch.strided for gradient in gradients):
            raise RuntimeError("[FusedAdam] expected dense gradients, got sparse ones")
        for parameter in parameters:
            self.initialize_state(parameter)
        if self.capturable:
            states = [self.state[parameter] for parameter in parameters]
            how = (factor, self.adam_w_mode)
            values, amaxes = step_on_device(group, parameters, states, gradients, *how)
            _write_quantized(parameters, values, amaxes)
            return
        most = _MOST_VALUES if self._stored.narrow else sys.maxsize
        for some in portions([parameter.numel() for parameter in parameters], most):
            self._step_portion(group, parameters[some], gradients[some], factor)

    def _step_portion(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[Any],
        factor: torch.Tensor | None,
    ) -> None:
        device, of_each = parameters[0].device, [self.state[p] for p in parameters]
        firsts, seconds, values = (
            [self._stored.value(*one, name) for one in zip(of_each, parameters, strict=True)]
            for name in STATES
        )
        so_far = torch.full((len(values),), group["step"] - 1.0, device=device).unbind()
        beta1, beta2 = group["betas"]
        (adamw if self.adam_w_mode else adam)(
            values,
            [
                (gradient.float() if factor is None else gradient.float() * factor).contiguous()
                for gradient in gradients
            ],
            firsts,
            seconds,
            [],
            list(so_far),
            fused=device.type in _FUSED,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        stepped = dict(zip(STATES, (firsts, seconds, values), strict=True))
        for name in self._stored.narrow:
            for state, parameter, value in zip(of_each, parameters, stepped[name], strict=True):
                if name in state:
                    self._stored.store(state, parameter, name, value)
        whole = [
            i for i, parameter in enumerate(parameters) if not self._stored.is_split(parameter)
        ]
        _write([parameters[i] for i in whole], [values[i] for i in whole])

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Initialise the missing entries of a parameter's state.

        Args:
            param: of this optimizer.
            store_param_remainders: has no effect; the constructor's counts.
        """
        state = self.state[param]
        quantized = piece_of(param) is not None
        if quantized and not self.master_weights:
            raise RuntimeError(
                "[FusedAdam] expected master_weights=True for parameters kept in FP8, which small "
                "steps would leave as they are, got False"
            )
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                self._stored.store(state, param, name, _zeros(param))
        narrow = quantized or param.dtype != torch.float32
        if self.master_weights and narrow and "master_param" not in state:
            self._stored.store(state, param, "master_param", _initial(param))
        for name in STATES:
            if name in state:
                state[name] = state[name].contiguous()

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A tensor of a parameter's state, fp32.

        Args:
            param: of this optimizer.
            state_name: `exp_avg`, `exp_avg_sq` or `master_param`.
        """
        return self._stored.value(self.state[param], param, state_name)

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Overwrite a tensor of a parameter's state.

        Args:
            param: of this optimizer.
            state_name: `exp_avg`, `exp_avg_sq` or `master_param`.
            unscaled_state: of the parameter's shape.
        """
        self.initialize_state(param)
        self._overwrite(param, state_name, unscaled_state)

    def _overwrite(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self._stored.store(self.state[parameter], parameter, name, _zeros(parameter).copy_(value))

    def state_dict(self) -> dict[str, Any]:
        """The states in fp32 whatever is stored, and the groups; see `torch.optim.Optimizer`."""
        packed: dict[str, Any] = super().state_dict()
        groups = zip(self.param_groups, packed["param_groups"], strict=True)
        for group, saved in groups if self._stored.narrow else ():
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in packed["state"]:
                    names = packed["state"][number]
                    values = {name: self.get_unscaled_state(parameter, name) for name in names}
                    packed["state"][number] = values
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict`; states stay fp32, which torch's optimizers would cast.

        Args:
            state_dict: of an optimizer of the same groups; also of `torch.optim.AdamW` or `Adam`,
                where the parameters of a group have taken equally many steps.

        Raises:
            NotImplementedError: a group with `amsgrad` or `maximize`.
            ValueError: a state of another shape than its parameter, or of another type than dict;
                parameters of a group that have taken different numbers of steps.
        """
        state_dict = steps_of_groups(state_dict)
        check_shapes(self.param_groups, state_dict)
        super().load_state_dict(state_dict)
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        for group, saved in groups:
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    if isinstance(value, torch.Tensor):
                        self.state[parameter].pop(name)
                        self._overwrite(parameter, name, value)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Of its shape; kernels of optimizers read memory in order, whatever the strides are."""
    return torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)


def _write(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Round values into parameters of other dtypes; FP8 weights are written together."""
    for parameter, value in zip(parameters, values, strict=True):
        if piece_of(parameter) is None and value is not parameter:
            parameter.copy_(value)
    _write_quantized(parameters, values)


def _write_quantized(
    parameters: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None] = (),
) -> None:
    """Round values into FP8 weights, all at once; see `tensor.writing.write`."""
    pieces = [piece_of(parameter) for parameter in parameters]
    found = [(i, piece) for i, piece in enumerate(pieces) if piece is not None]
    known = [amaxes[i] for i, _ in found] if amaxes else []
    write([piece for _, piece in found], [local_part(values[i]) for i, _ in found], known)


def _initial(param: Any) -> torch.Tensor:
    """A parameter in fp32; an FP8 weight as it was before the cast, if it still has that value."""
    initial = initial_value(param)
    value = None if initial is None else initial.get()
    if value is None:
        piece = piece_of(param)
        if piece is None:
            return param.detach().float()
        return with_piece(param, piece.dequantize(dtype=torch.float32))
    initial.clear()
    return with_piece(param, value.to(param.device, torch.float32))
