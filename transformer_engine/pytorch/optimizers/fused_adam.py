"""`FusedAdam`: Adam in fp32, whatever the dtype of the parameters."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from transformer_engine._flags import checked_flag
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.module.arguments import refuse_others
from transformer_engine.pytorch.optimizers import loss_scaling
from transformer_engine.pytorch.optimizers.arguments import (
    check_factor,
    check_settings,
    loss_of,
    refuse_settings,
)
from transformer_engine.pytorch.optimizers.on_device import step_on_device
from transformer_engine.pytorch.optimizers.parts import (
    Part,
    check_gradients,
    count_writes,
    initial_master,
    local_gradient,
    master_of,
    part_of,
    state_with,
    write_quantized,
    write_values,
    zeros_for,
)
from transformer_engine.pytorch.optimizers.states import fp32_states, portions
from transformer_engine.pytorch.optimizers.stored_states import STATES, StoredStates, check_name
from transformer_engine.pytorch.parallel.dtensors import local_part

_FUSED = ("cpu", "cuda")
_FLAGS = ("adam_w_mode", "bias_correction", "capturable", "master_weights", "use_decoupled_grad")
_MOMENTS = STATES[:2]
_MOST_VALUES = 2**26  # how many values of narrow states are converted to fp32 at once


class FusedAdam(torch.optim.Optimizer):
    """Adam with states in fp32, by torch's fused kernels, or with `capturable` by one of ours.

    Steps of 16-bit and FP8 parameters are computed in fp32, and results are rounded. With master
    weights the fp32 results are kept, too. `group["step"]` counts the steps.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the means of gradients and of squared gradients.
        eps: added to the root of the mean square.
        weight_decay: factor of the parameter in the step.
        amsgrad: must be False.
        bias_correction: correct the means for their start at zero, in all groups alike.
        adam_w_mode: weight decay as in `torch.optim.AdamW`; else it is added to the gradient.
        capturable: count steps on the device, so that a step can be captured in a CUDA graph, after
            one step before the capture. Replays read the learning rate if it is a tensor. One
            kernel reads and writes each value once. States with a scale are refused.
        master_weights: keep an fp32 copy of each parameter that is not in fp32, as `master_param`
            of its state. FP8 parameters need it; their copy starts with
            `get_high_precision_init_val()` if there is one.
        master_weight_dtype: float32, or float16 with a scale for each tensor.
        exp_avg_dtype: float32, bfloat16, or float16 or uint8 (FP8 E4M3) with a scale for each
            tensor. Steps are computed in fp32 whatever is stored.
        exp_avg_sq_dtype: likewise.
        use_decoupled_grad: gradients are in `parameter.decoupled_grad`.
        store_param_remainders: of fp32 master weights of bf16 parameters, store only the lower 16
            bits; the parameters have the upper bits, rounded to nearest, halfway away from zero.
        set_grad_none: argument of older versions; must be None or True.

    Raises:
        NotImplementedError: other values of these arguments.
        ValueError: numbers out of range.
        TypeError: arguments that are not numbers or not flags.

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
        others = {"amsgrad": amsgrad, "set_grad_none": set_grad_none is not False}
        refuse_others("FusedAdam", None, others, {"amsgrad": False, "set_grad_none": True})
        dtypes = dict(
            zip(STATES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        fp32_masters = master_weights and master_weight_dtype is torch.float32
        self._stored = StoredStates(dtypes, store_param_remainders and fp32_masters)
        self._stored.check(capturable)
        self.adam_w_mode = adam_w_mode
        self.bias_correction = bias_correction
        self.capturable, self.master_weights = capturable, master_weights
        self.use_decoupled_grad = use_decoupled_grad
        for name in _FLAGS:
            checked_flag("FusedAdam", name, getattr(self, name))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer` does.

        Args:
            param_group: `params`, and settings that differ from the defaults.

        Raises:
            NotImplementedError, ValueError, TypeError: settings that the constructor refuses.
        """
        refuse_settings(param_group, self.bias_correction)
        check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return loss_scaling.takes_scaled(self)

    @loss_scaling.hides_scaler
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_scaler: Any = None,
        grad_factor: torch.Tensor | None = None,
    ) -> Any:
        """Step every parameter that has a gradient; compiled code leaves its graph for the step.

        Args:
            closure: computes the loss and the gradients again.
            grad_scaler: a `torch.amp.GradScaler`; `grad_scaler.step(optimizer)` does the same.
                Gradients are unscaled in the kernel, and an overflow changes nothing. With
                `capturable` the host does not wait.
            grad_factor: one value on the device that multiplies gradients; see `clip_factor`.

        Returns:
            What `closure` returns.

        Raises:
            TypeError: a `grad_factor` that is no tensor; another `grad_scaler`; parameters or
                gradients that are not of floating point.
            ValueError: a gradient of another shape than its parameter; several factors.
            NotImplementedError: a `grad_scaler` with a `closure` or `use_decoupled_grad`.
            RuntimeError: sparse gradients; FP8 parameters without `master_weights`; in a CUDA graph
                capture without `capturable`.
        """
        if not torch.compiler.is_compiling():
            return self._step_all(closure, grad_scaler, grad_factor)
        # A fused step breaks the graph, and Dynamo's guards of `self.state` behind a break are
        # wrong: it would step a parameter with the state of another one.
        from transformer_engine.pytorch.chain.outside_of_graphs import outside_of_graphs  # noqa: PLC0415

        return outside_of_graphs(self._step_all, closure, grad_scaler, grad_factor)

    @torch.no_grad()
    @loss_scaling.forgets_scale
    def _step_all(
        self, closure: Callable[[], Any] | None, grad_scaler: Any, grad_factor: torch.Tensor | None
    ) -> Any:
        if grad_scaler is not None:
            inner = partial(self._step_all, None, None, grad_factor)
            return loss_scaling.step_by(grad_scaler, self, closure, inner)
        check_factor(grad_factor)
        if is_capturing() and not self.capturable:
            raise RuntimeError(
                "[FusedAdam] expected capturable=True in a CUDA graph capture, whose replays would "
                "repeat the number of this step, got False"
            )
        loss = loss_of(closure)
        factor, found_inf = loss_scaling.scaling_of(self, grad_factor)
        if found_inf is not None and not self.capturable and found_inf:
            return loss
        where = self._gradients
        for group in self.param_groups:
            by_device: dict[torch.device, list[tuple[torch.Tensor, Any]]] = {}
            for parameter in group["params"]:
                gradient = getattr(parameter, where, None)
                if gradient is not None:
                    by_device.setdefault(parameter.device, []).append((parameter, gradient))
            loss_scaling.count_step(group, self.param_groups, self.capturable, found_inf)
            for members in by_device.values():
                parts = [part_of(parameter) for parameter, _ in members]
                self._step(group, parts, [gradient for _, gradient in members], factor, found_inf)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, with this class's settings."""
        return super().__getstate__() | {name: getattr(self, name) for name in (*_FLAGS, "_stored")}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that steps read.

        Args:
            set_to_none: leave None, else zeros.
        """
        super().zero_grad(set_to_none)
        if not self.use_decoupled_grad:
            return
        for parameter in chain(*(group["params"] for group in self.param_groups)):
            gradient = getattr(parameter, self._gradients, None)
            if gradient is not None:
                parameter.decoupled_grad = None if set_to_none else torch.zeros_like(gradient)

    @property
    def _gradients(self) -> str:
        """The attribute of parameters that has their gradients."""
        return "decoupled_grad" if self.use_decoupled_grad else "grad"

    def _step(
        self,
        group: dict[str, Any],
        parts: list[Part],
        gradients: list[Any],
        factor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        check_gradients(parts, gradients, self.use_decoupled_grad)
        states = [self._initialized(part) for part in parts]
        if self.capturable or not self._stored.narrow:
            gradients = [local_gradient(*one) for one in zip(parts, gradients, strict=True)]
        device = parts[0].local.device
        factor, found_inf = (x if x is None else x.to(device) for x in (factor, found_inf))
        if self.capturable:
            how = (factor, found_inf, self.adam_w_mode, self.bias_correction)
            values, amaxes = step_on_device(group, parts, states, gradients, *how)
            write_quantized(parts, values, amaxes)
        else:
            most = _MOST_VALUES if self._stored.narrow else sys.maxsize
            for some in portions([part.parameter.numel() for part in parts], most):
                self._step_portion(group, parts[some], states[some], gradients[some], factor)
        count_writes(parts)

    def _values(
        self, parts: list[Part], states: list[dict[str, Any]], name: str
    ) -> list[torch.Tensor]:
        """The fp32 values of the state `name` of each part; the state itself if stored in fp32."""
        pairs = zip(parts, states, strict=True)
        if self._stored.narrow:
            return [self._stored.value(state, part.parameter, name) for part, state in pairs]
        if name == STATES[2]:
            return [master_of(part, state) for part, state in pairs]
        return [part.own(state[name]) for part, state in pairs]

    def _step_portion(
        self,
        group: dict[str, Any],
        parts: list[Part],
        states: list[dict[str, Any]],
        gradients: list[Any],
        factor: torch.Tensor | None,
    ) -> None:
        firsts, seconds, values = (self._values(parts, states, name) for name in STATES)
        count = group["step"] - 1.0 if self.bias_correction else math.inf
        so_far = values[0].new_full((len(values),), count).unbind()
        beta1, beta2 = group["betas"]
        fused = values[0].device.type in _FUSED
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
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if fused:
            torch.autograd.graph.increment_version(values)  # torch's kernel does not
        stepped = dict(zip(STATES, (firsts, seconds, values), strict=True))
        for name in self._stored.narrow:
            for (parameter, *_), state, value in zip(parts, states, stepped[name], strict=True):
                if name in state:
                    self._stored.store(state, parameter, name, value)
        whole = [i for i, part in enumerate(parts) if not self._stored.is_split(part.parameter)]
        write_values([parts[i] for i in whole], [local_part(values[i]) for i in whole])

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Initialise missing entries of a parameter's state; its `InitialValue` is not cleared.

        Args:
            param: a parameter of this optimizer.
            store_param_remainders: has no effect; the constructor's argument counts.
        """
        self._initialized(part_of(param), clears=False)

    def _initialized(self, part: Part, clears: bool = True) -> dict[str, Any]:
        """The state of a parameter, with all its entries."""
        parameter = part.parameter
        state: dict[str, Any] = self.state[parameter]
        if part.piece is not None and not self.master_weights:
            raise RuntimeError(
                "[FusedAdam] expected master_weights=True for parameters kept in FP8, which small "
                "steps would leave as they are, got False"
            )
        narrow = part.piece is not None or part.local.dtype != torch.float32
        for name in STATES if self.master_weights and narrow else _MOMENTS:
            if name not in state:
                value = zeros_for(parameter) if name in _MOMENTS else initial_master(part, clears)
                self._stored.store(state, parameter, name, value)
            state[name] = state[name].contiguous()
        if self._stored.remainders:
            self._stored.join_unless_split(state, parameter)
        return state

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A tensor of a parameter's state, fp32.

        Args:
            param: a parameter of this optimizer.
            state_name: `master_param`, or from the first step on `exp_avg` or `exp_avg_sq`.
        """
        check_name(state_name)
        return self._stored.value(self.state[param], param, state_name)

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Overwrite a tensor of a parameter's state.

        Args:
            param: a parameter of this optimizer.
            state_name: `exp_avg`, `exp_avg_sq` or `master_param`.
            unscaled_state: of the parameter's shape, or a plain tensor for this rank's piece of it.
        """
        check_name(state_name)
        self.initialize_state(param)
        self._overwrite(param, state_name, unscaled_state)

    def _overwrite(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        made = state_with(value, parameter, name)
        self._stored.store(self.state[parameter], parameter, name, made)

    def state_dict(self) -> dict[str, Any]:
        """The states in fp32 whatever is stored, and the groups; see `torch.optim.Optimizer`."""
        packed: dict[str, Any] = super().state_dict()
        groups = zip(self.param_groups, packed["param_groups"], strict=True)
        for group, saved in groups if self._stored.narrow else ():
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in packed["state"]:
                    state = packed["state"][number]
                    values = {name: self._stored.value(state, parameter, name) for name in state}
                    packed["state"][number] = values
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict`; states stay fp32, while torch's optimizers would cast them.

        Args:
            state_dict: of an optimizer with the same groups; also of `torch.optim.AdamW` or `Adam`,
                if all parameters of a group have taken the same number of steps.

        Raises:
            NotImplementedError: a group with `amsgrad`, `maximize` or another `bias_correction`.
            ValueError: a state of another shape than its parameter, or of another type than dict;
                parameters of a group that have taken different numbers of steps.
        """
        with fp32_states(self, self._overwrite):
            super().load_state_dict(dict(state_dict))
