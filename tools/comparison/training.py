"""Trains a module for a few steps in one of many uses (`USES`), and records all results."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from comparison.bench import PRECISIONS, RECIPES, Bench
from comparison.findings import tensors_in

RATE = 2.0**-10  # learning rate of gradient descent
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
WRAPS: dict[str, Callable[..., Any]] = {
    "te": lambda f, *a: te.checkpoint(f, *a, use_reentrant=True),
    "te, not reentrant": lambda f, *a: te.checkpoint(f, *a, use_reentrant=False),
    "torch": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch, not reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
}


@dataclass(frozen=True)
class Use:
    """How a module is used.

    Attributes:
        wrap: the checkpoint function, a key of WRAPS; "" for none.
        microbatches: each step has three micro-batches, and casts weights only for the first one.
        calibrates: the first step runs with `calibrating=True` instead of FP8.
        fp8_weights: parameters are kept in FP8.
        main_grad: weights have a `main_grad`, "in fp32" or in the dtype of the "operands".
        frozen: regular expression for the names of parameters that need no gradient.
        constant_input: inputs need no gradient.
        backwards: number of backwards after each forward.
        hooked: every module has a forward hook.
        moved: after a step, training continues with "a copy" of the module, or with "another"
            module that has loaded its state.
        accumulates: gradients are not set to None between steps.
        arguments: further arguments of the constructor.
    """

    wrap: str = ""
    microbatches: bool = False
    calibrates: bool = False
    fp8_weights: bool = False
    main_grad: str = ""
    frozen: str = ""
    constant_input: bool = False
    backwards: int = 1
    hooked: bool = False
    moved: str = ""
    accumulates: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()


USES = {
    "plain": Use(),
    "microbatches": Use(microbatches=True),
    "calibrating": Use(calibrates=True),
    "fp8 weights": Use(fp8_weights=True),
    "fp8 weights, microbatches": Use(fp8_weights=True, microbatches=True),
    "main_grad": Use(main_grad="in fp32"),
    "narrow main_grad, microbatches": Use(main_grad="operands", microbatches=True),
    "frozen weights": Use(frozen=r"weight\d*$"),
    "frozen biases": Use(frozen=r"bias\d*$"),
    "frozen": Use(frozen="."),
    "constant input": Use(constant_input=True),
    "two backwards": Use(backwards=2),
    "hooked": Use(hooked=True),
    "copied": Use(moved="a copy"),
    "reloaded": Use(moved="another"),
    "accumulating": Use(accumulates=True),
    "keeping inputs": Use(arguments=(("save_original_input", True),)),
    **{f"checkpoint of {name}": Use(wrap=name) for name in WRAPS},
    "checkpoint of te, microbatches": Use(wrap="te, not reentrant", microbatches=True),
}


@dataclass(frozen=True)
class Subject:
    """The module that is trained.

    Attributes:
        build: makes the module from arguments of its constructor.
        arguments: draws the arguments of a call, in a dtype.
        parameters_named: the constructor's argument for the dtype of parameters.
        finish: replaces the module before the first step.
    """

    build: Callable[..., nn.Module]
    arguments: Callable[[Bench, torch.dtype], Arguments]
    parameters_named: str = "params_dtype"
    finish: Callable[[nn.Module], nn.Module] = lambda module: module


def train(
    bench: Bench, subject: Subject, precision: str, recipe: str, use: str, steps: int = 3
) -> None:
    """Train a module, evaluate it, and train one more step; add all results to the findings.

    Args:
        bench: the device and the findings.
        subject: the module.
        precision: a key of PRECISIONS.
        recipe: a key of RECIPES.
        use: a key of USES.
        steps: number of steps before the evaluation.
    """
    training = _Training(bench, subject, precision, recipe, USES[use])
    for step in range(steps):
        training.step(step)
    training.evaluate()
    training.step(steps)  # must not depend on the evaluation
    bench.found.add("state", dict(training.module.state_dict()))


class _Training:
    """A module that is trained, with the settings of one use."""

    def __init__(
        self, bench: Bench, subject: Subject, precision: str, recipe: str, use: Use
    ) -> None:
        self.bench, self.subject, self.use = bench, subject, use
        self.precision, self.recipe = PRECISIONS[precision], RECIPES[recipe]
        self.module = self._build()
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.dim() == 1:  # biases and norms would start with zeros and ones
                    parameter.add_(bench.like(parameter), alpha=0.3)
        self._prepare()
        self.module = subject.finish(self.module)

    def _build(self) -> nn.Module:
        arguments = dict(self.use.arguments)
        arguments["device"] = self.bench.device
        arguments[self.subject.parameters_named] = self.precision.dtype
        if self.use.main_grad:
            arguments["fuse_wgrad_accumulation"] = True
        init_context: Any = nullcontext()
        if self.use.fp8_weights:
            init_context = te.fp8_model_init(enabled=True, recipe=self.recipe)
        with init_context:
            return self.subject.build(**arguments)

    def _prepare(self) -> None:
        """Freeze parameters, add hooks, and add `main_grad`, as the use says."""
        for name, parameter in self.module.named_parameters():
            if self.use.frozen and re.search(self.use.frozen, name):
                parameter.requires_grad_(False)
            if self.use.main_grad:
                dtype = self.precision.autocast or self.precision.dtype
                dtype = torch.float32 if self.use.main_grad == "in fp32" else dtype
                parameter.main_grad = torch.empty_like(parameter, dtype=dtype)
                if self.use.main_grad == "operands" and parameter.dim() > 1:
                    parameter.grad_added_to_main_grad = False
                    parameter.zero_out_wgrad = True  # else the gradient has undefined values
        if self.use.hooked:
            for module in self.module.modules():
                module.register_forward_hook(lambda *_: None)

    def step(self, number: int) -> None:
        """One step of gradient descent; every second step has two forwards before a backward."""
        if number == 1 and self.use.moved:
            self._move()
        if self.use.main_grad:  # earlier values count, except in a first micro-batch
            for parameter in self.module.parameters():
                parameter.main_grad.copy_(self.bench.like(parameter.main_grad))
        firsts = (True, False, False) if self.use.microbatches else (None,)
        waiting: list[tuple[str, Any, Any]] = []
        for place, first in enumerate(firsts):
            waiting.append(self._forward(f"step{number}.call{place}", number, first))
            if len(waiting) > number % 2:
                self._backward(*waiting.pop(0))
        for call in waiting:
            self._backward(*call)
        self._descend(f"step{number}")

    def _move(self) -> None:
        old = self.module
        if self.use.moved == "a copy":
            self.module = copy.deepcopy(old)
        else:
            self.module = self._build()
            self.module.load_state_dict(old.state_dict())

    def _forward(self, name: str, number: int, first: bool | None) -> tuple[str, Any, Any]:
        positional, named = self.subject.arguments(self.bench, self.precision.dtype)
        if first is not None:
            named = {**named, "is_first_microbatch": first}
        inputs = [x for x in tensors_in([positional, named]) if x.is_leaf and x.requires_grad]
        if self.use.constant_input:
            for x in inputs:
                x.requires_grad_(False)
        calibrates = self.use.calibrates and number == 0
        with self.bench.scope(
            self.precision, self.recipe, enabled=not calibrates, calibrating=calibrates
        ):
            out = self._call(positional, named)
        self.bench.found.add(f"{name}.out", out)
        return name, inputs, out

    def _call(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.use.wrap:
            return self.module(*positional, **named)
        return WRAPS[self.use.wrap](lambda *a: self.module(*a, **named), *positional)

    def _backward(self, name: str, inputs: list[torch.Tensor], out: Any) -> None:
        ends = [x for x in tensors_in(out) if x.requires_grad]
        for again in reversed(range(self.use.backwards)):
            if ends:
                grads = [self.bench.like(x) for x in ends]
                torch.autograd.backward(ends, grads, retain_graph=again > 0)
        self.bench.found.add(f"{name}.input gradient", [x.grad for x in inputs])

    def _descend(self, name: str) -> None:
        for own, parameter in self.module.named_parameters():
            gradient = parameter.grad
            self.bench.found.add(f"{name}.gradient.{own}", gradient)
            if self.use.main_grad and parameter.dim() > 1:
                gradient = parameter.main_grad
                announced = getattr(parameter, "grad_added_to_main_grad", None)
                self.bench.found.add(f"{name}.main_grad.{own}", [gradient, announced])
            if gradient is not None and parameter.requires_grad:
                with torch.no_grad():
                    parameter.add_(gradient.to(parameter.dtype), alpha=-RATE)
            if not self.use.accumulates:
                parameter.grad = None

    def evaluate(self) -> None:
        """A call in evaluation mode, and one in training mode under `no_grad`."""
        self.module.eval()
        for name in ("evaluation", "without gradients"):
            positional, named = self.subject.arguments(self.bench, self.precision.dtype)
            with torch.no_grad(), self.bench.scope(self.precision, self.recipe):
                self.bench.found.add(name, self.module(*positional, **named))
            self.module.train()
