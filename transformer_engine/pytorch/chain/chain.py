"""A chain is the data flow of a module: a list of stages, and the values that pass between them.

Values, parameters and gradients are numbered alike: first the values that come in, then the
parameters of all stages, then the results of each stage. `stage_by_stage.py` runs a chain,
`segments.py` repeats such a run by one call, and `node.py` makes it one node of autograd's graph.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from transformer_engine.pytorch._torch_private import constant_in_graphs
from transformer_engine.pytorch.chain.plan import CallPlan, Recordings
from transformer_engine.pytorch.chain.stage import Stage
from transformer_engine.pytorch.fp8.exporting import exporting

if TYPE_CHECKING:
    from transformer_engine.pytorch.chain.stages.matmul import Matmul


class ChainStep(NamedTuple):
    """One stage of a chain.

    Attributes:
        stage: the stage that runs.
        inputs: numbers of the values that the stage reads.
        parameters: numbers of the stage's parameters, which are consecutive.
        outputs: numbers of the values that the stage makes.
        consumer: number of the step that may request operands from this one. It is in the same
            part, and the only step that reads the first result of this one, as its first input.
            -1 if there is none.
        producer: number of the step whose `consumer` is this one; -1 if there is none.
        last_reads: the values that no later step reads and the chain does not return.
    """

    stage: Stage
    inputs: tuple[int, ...]
    parameters: slice
    outputs: tuple[int, ...]
    consumer: int = -1
    producer: int = -1
    last_reads: tuple[int, ...] = ()

    def draw_seed(self, plan: Any, values: list[Any], seed: int, device: torch.device) -> None:
        """Put a new seed into `values[seed]` if the caller has passed None."""
        if values[seed] is None:
            values[seed] = self.stage.draw(plan, device)


class ChainBuilder:
    """Collects the stages of a chain. An int stands for a value; `add` returns those of a stage.

    Args:
        names: names of the values that come in.

    Attributes:
        tokens: for each value, the ratio of its number of tokens (the first size) to that of an
            input of the chain: of the input that is reached from the value by going back through
            the first inputs of the stages.
    """

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.tokens: list[Fraction | int] = [1] * len(names)
        self.inputs = len(names)
        self.stages: list[tuple[Stage, tuple[int, ...], tuple[int, ...]]] = []
        self.parts: list[int] = []  # number of the first stage of each part

    def add(self, stage: Stage, *inputs: int) -> list[int]:
        """Append a stage that reads these values.

        Returns:
            The numbers of its results.
        """
        outputs = tuple(range(len(self.names), len(self.names) + len(stage.results)))
        self.names += stage.results
        self.tokens += [self.tokens[inputs[0]] * stage.token_ratio] * len(stage.results)
        self.stages.append((stage, inputs, outputs))
        return list(outputs)

    def add_part(self, chain: Chain, *inputs: int) -> list[int]:
        """Append the stages of a chain, applied to these values, as one part of the new chain.

        Returns:
            The numbers of the values that the chain returns.
        """
        self.parts.append(len(self.stages))
        values = dict(enumerate(inputs))
        for step in chain.steps:
            made = self.add(step.stage, *[values[v] for v in step.inputs])
            values.update(zip(step.outputs, made, strict=True))
        return [values[v] for v in chain.outputs]

    def chain(self, *outputs: int) -> Chain:
        """The chain that returns these values."""
        return Chain(self, outputs)


# Copies of chains that belong to no module, by `Chain.kind`. Operators of compiled code run them.
TEMPLATES: dict[str, Chain] = {}


def _kind_of(chain: Chain) -> str:
    """A hash of stages and settings, equal for chains that differ only in names.

    Empty if compiled code has to trace the chain stage by stage.
    """
    if chain.communicates or any(m.fuse_wgrad or m.delayed is not None for m in chain.matmuls):
        return ""
    rows = [
        (type(step.stage).__name__, step.stage.settings(), step.inputs, step.outputs)
        for step in chain.steps
    ]
    text = repr((rows, chain.inputs, chain.outputs, chain.parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Chain:
    """A fixed list of stages, and the values that a call returns.

    Attributes:
        inputs: the number of values that come in.
        arguments: the number of values that come in, plus the number of parameters.
        names: names of all values.
        kind: see `_kind_of`.
        parts: `(start, stop)` of each range of steps that are planned together.
        communicates: some of its stages are collectives.
        takes_strides: all of its stages read tensors of any strides.
        adding: the chain of the same stages whose last one, a `Matmul`, also adds a residual; None
            if there is none.
        most_shapes: how many shapes of inputs are recorded at most.
    """

    adding: Chain | None = None
    most_shapes = 32

    def __init__(self, built: ChainBuilder, outputs: Sequence[int]) -> None:
        self.inputs = built.inputs
        count = sum(stage.parameter_count for stage, _, _ in built.stages)
        self.arguments = self.inputs + count
        made = built.names[self.inputs :]
        self.names = (*built.names[: self.inputs], *["parameter"] * count, *made)
        self.results = [None] * len(made)

        def numbers(values: Sequence[int]) -> tuple[int, ...]:
            return tuple([v if v < self.inputs else v + count for v in values])

        self.outputs = numbers(outputs)
        steps, first = [], self.inputs
        for stage, read, results in built.stages:
            own = slice(first, first + stage.parameter_count)
            steps.append(ChainStep(stage, numbers(read), own, numbers(results)))
            first = own.stop
        self.parts = tuple(pairwise([*(built.parts or [0]), len(steps)]))
        self.steps = tuple(self._linked(steps))
        self.layer = ""  # for messages
        self.communicates = any([step.stage.communicates for step in self.steps])
        self.takes_strides = all([step.stage.takes_strides for step in self.steps])
        self.gemm_names = self._gemm_names()
        self.kind = _kind_of(self)

    @classmethod
    def of(cls, *stages: Stage) -> Chain:
        """A chain in which each stage reads the first result of the stage before it.

        It returns the first result of the last stage, then the further results of every stage.
        """
        built = ChainBuilder("input")
        value = 0
        further: list[int] = []
        for stage in stages:
            value, *results = built.add(stage, value)
            further += results
        return built.chain(value, *further)

    @classmethod
    def able_to_add(cls, *stages: Stage) -> Chain:
        """`Chain.of` these stages, with `adding` if the last one is a `Matmul`.

        The residual of `adding` is the second result of the first stage. If that has only one
        result, the residual is the second value that comes in.
        """
        chain = cls.of(*stages)
        if stages[-1].multiplies:
            tapped = len(stages[0].results) > 1
            built = ChainBuilder("input") if tapped else ChainBuilder("input", "residual")
            value, residual = 0, 1
            for stage in stages[:-1]:
                value, *others = built.add(stage, value)
                residual = (*others, residual)[0]
            chain.adding = built.chain(*built.add(stages[-1], value, residual))
        return chain

    def _linked(self, steps: Sequence[ChainStep]) -> Iterable[ChainStep]:
        readers: dict[int, list[int]] = {value: [] for value in range(len(self.names))}
        makers: dict[int, int] = {}
        part_of = {i: part for part, (a, b) in enumerate(self.parts) for i in range(a, b)}
        for i, step in enumerate(steps):
            for value in step.inputs:
                readers[value].append(i)
            makers.update(dict.fromkeys(step.outputs, i))

        def consumer_of(maker: int, value: int) -> int:
            """The step that may request operands of a value; -1 if there is none."""
            reader = readers[value][0] if len(readers[value]) == 1 else -1
            if reader < 0 or value in self.outputs or steps[reader].inputs[0] != value:
                return -1
            return reader if part_of[reader] == part_of[maker] else -1

        for i, step in enumerate(steps):
            maker = makers.get(step.inputs[0], -1)
            first = maker >= 0 and steps[maker].outputs[0] == step.inputs[0]
            producer = maker if first and consumer_of(maker, step.inputs[0]) == i else -1
            ended = [v for v in set(step.inputs) if readers[v][-1] == i and v not in self.outputs]
            unread = [v for v in step.outputs if not readers[v] and v not in self.outputs]
            yield step._replace(
                consumer=consumer_of(i, step.outputs[0]),
                producer=producer,
                last_reads=tuple(ended + unread),
            )

    @property
    def stages(self) -> list[Stage]:
        """Its stages, in order."""
        return [step.stage for step in self.steps]

    @property
    def matmuls(self) -> list[Matmul]:
        """Its stages with GEMMs."""
        return [cast("Matmul", stage) for stage in self.stages if stage.multiplies]

    def _gemm_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.matmuls)

    def rename(self, layer: str) -> None:
        """Tell every stage the new name of the module."""
        self.layer = layer
        for stage in self.stages:
            stage.rename(layer)
        self.gemm_names = self._gemm_names()
        if self.adding is not None:
            self.adding.rename(layer)

    def take_over(self, before: Chain) -> None:
        """Take cached weights and delayed gradients from the module's previous chain."""
        self.layer = before.layer
        if self.adding is not None:
            self.adding.layer = before.layer
        for own, other in zip(self.matmuls, before.matmuls, strict=True):
            vars(own).update({name: getattr(other, name) for name in own.lasting})

    @constant_in_graphs
    def keep_template(self) -> bool:
        """Register a copy as the template of all chains of this kind. Dynamo calls this."""
        if self.kind not in TEMPLATES:
            template = TEMPLATES[self.kind] = copy.deepcopy(self)
            template.rename("in compiled code")
            for stage in template.matmuls:
                stage.cached_weight = None
        return True

    def prepare(self, plan: CallPlan) -> CallPlan:
        """Let every stage make its plan, and return the plan of the call."""
        plan.chain = self
        plan.compiling = torch.compiler.is_compiling()
        plan.exporting = exporting()
        plan.requires_grad = plan.requires_grad and not plan.exporting
        plans = [step.stage.prepare(plan, step.parameters.start) for step in self.steps]
        inspected = any([gemm.wrapped for gemm in plan.quantizers])
        for i, step in enumerate(self.steps):
            if step.producer == i - 1 >= 0 and not inspected:
                again = self.steps[i - 1].stage.recomputes()
                step.stage.omit_input(plans[i], again, step.outputs[0] in self.outputs)
        plan.stage_plans = plans
        plan.differentiable = [plan.requires_grad] * len(plans)
        if not plan.compiling and not plan.exporting:
            plan.recordings = Recordings()
        plan.accumulates = plan.requires_grad and any(
            [step.stage.accumulates(own) for step, own in zip(self.steps, plans, strict=True)]
        )
        pairs = [(step.stage, own) for step, own in zip(self.steps, plans, strict=True)]
        plan.caching = [pair for pair in pairs if pair[0].caches(pair[1])]
        plan.dropping = [stage for stage, own in pairs if stage.multiplies and own.drops_cache]
        return plan

    def __str__(self) -> str:
        """The data flow: a line for each stage, with the values that it reads and makes."""
        rows = [
            (
                step.stage.label,
                ", ".join(self.names[v] for v in step.inputs),
                ", ".join(self.names[v] for v in step.outputs),
            )
            for step in self.steps
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  -> {c}" for a, b, c in rows]
        return "\n".join([*lines, f"returns {', '.join(self.names[v] for v in self.outputs)}"])


def run_exported(plan: CallPlan, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a call with operators that have an ONNX form, while it is traced for ONNX."""
    chain: Chain = plan.chain
    values = [*inputs, *chain.results]
    for step, own in zip(chain.steps, plan.stage_plans, strict=True):
        read = [values[v] for v in step.inputs]
        made = step.stage.exported(read, values[step.parameters], own)
        for v, result in zip(step.outputs, made, strict=True):
            values[v] = result
    first, *others = [values[v] for v in chain.outputs]
    return first.to(plan.dtype), *others


Targets = Mapping[int, Any]  # `WgradTarget`s by the number of their step


def wgrad_targets(plan: CallPlan, inputs: Sequence[Any]) -> Targets:
    """A target for each step whose weight gradient goes into an existing tensor (`main_grad`)."""
    targets = {}
    for i, (step, own) in enumerate(zip(plan.chain.steps, plan.stage_plans, strict=True)):
        target = step.stage.wgrad_target(own, inputs[step.parameters])
        if target is not None:
            targets[i] = target
    return targets


def reader(numbers: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that takes these elements out of a sequence."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda sequence: tuple([sequence[number] for number in numbers])
