"""`GroupedLinear`: several Linears of one size, each for its part of the rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.chain.flow import EAGER, Flow, FusedLayers
from transformer_engine.pytorch.chain.run_layer import run_as_one
from transformer_engine.pytorch.fp8.scaling_state import (
    BACKWARD,
    FORWARD,
    ScalingState,
    of_length,
    state_with,
)
from transformer_engine.pytorch.module.arguments import (
    check_sizes,
    list_of_ints,
    refuse_others,
    tensor_parallel,
)
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.grouped_parts import (
    GroupedPart,
    ParameterSetsOfParts,
    of_parts,
)
from transformer_engine.pytorch.module.inputs import check_features, check_plain
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.parallel_mode import SharedLinear, parallel_mode_of

# Keywords of newer versions of the API, with the only value that is implemented. They are not in
# the signature, because programs look there whether other values are possible.
_LATER = {"single_grouped_weight": False, "single_grouped_bias": False, "use_grouped_tensor": None}


class GroupedLinear(TransformerEngineBaseModule):
    """Applies `y_i = x_i . A_i^T + b_i` to each part `x_i` of the rows of the input.

    This is the layer of a mixture of experts: tokens are sorted by expert, and each expert has its
    own weight. Part i behaves like a `Linear` of the name `<name>.gemm_<i>`: it has its own FP8
    scales and its own statistics in the debugger, and pads its rows where FP8 needs it.

    Tensor parallel ranks hold a shard of each weight, by `parallel_mode`. The layer runs no
    collectives: the code that dispatches tokens to experts gathers inputs, and sums outputs of
    row-parallel layers.

    Args:
        num_gemms: number of parts.
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: learn additive biases.
        return_bias: return `(y without biases, list of biases)`.
        delay_wgrad_compute: see `Linear`.
        sequence_parallel: see `Linear`; even then the input has the tokens of all ranks.
        tp_group: see `Linear`.
        tp_size: see `Linear`.
        parallel_mode: `"column"`: each rank has some of the outputs; `"row"`: each has some of the
            inputs, and its output is a partial sum; None: the ranks do not share the layer.
        name: for messages, reports and the debugger.
        arguments: further arguments of `Linear`, all but `parameters_split` and those of overlap.

    Attributes:
        weight0, weight1, ...: `[out_features, in_features]`, one of each part; or a rank's share.
        bias0, bias1, ...: `[out_features]`, likewise.

    Raises:
        ValueError: no parts, or what `Linear` refuses; `parallel_mode="row"` with a bias that every
            rank would add; arguments that switch overlap of communication on.
        NotImplementedError: parameters of all parts in one tensor (`single_grouped_weight`,
            `single_grouped_bias`, `use_grouped_tensor`).
        TypeError: unknown arguments.

    >>> import torch
    >>> GroupedLinear(2, 16, 32, device="cpu")(torch.ones(5, 16), [3, 2]).shape
    torch.Size([5, 32])
    """

    _shown = ("num_gemms", "in_features", "out_features", "use_bias")
    joint_state = True
    delay_wgrad_compute: bool = of_parts()
    fuse_wgrad_accumulation: bool = of_parts()
    parallel_mode: str | None = of_parts()
    return_bias: bool = of_parts()
    save_original_input: bool = of_parts()

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        # Not registered as submodules: their parameters are this module's, under its names.
        self._parts: tuple[Linear, ...] = ()
        self._fused = FusedLayers()
        super().__init__(num_gemms, name, in_features=in_features, out_features=out_features)
        check_sizes("GroupedLinear", self.name, 1, num_gemms=num_gemms)
        refuse_others("GroupedLinear", self.name, arguments, _LATER)
        arguments = {name: x for name, x in arguments.items() if name not in _LATER}
        if "parameters_split" in arguments:
            raise TypeError("GroupedLinear() got an unexpected keyword argument parameters_split")
        on = [key for key, flag in arguments.items() if key.startswith("ub_") and flag is True]
        if on:
            raise ValueError(
                f"[GroupedLinear] expected no overlap of communication, which it does not do, got"
                f" {', '.join(on)} (layer {self.name})"
            )
        self.ranks = tensor_parallel(self, tp_group, tp_size, sequence_parallel)
        self.sequence_parallel = sequence_parallel
        shared = SharedLinear(parallel_mode_of(parallel_mode, "GroupedLinear"), self.ranks)
        self.num_gemms, self.use_bias = num_gemms, bias
        self.in_features = shared.inputs("in_features", in_features)
        self.out_features = shared.outputs("out_features", out_features)
        self.ub_name = arguments.get("ub_name")
        self._parts = tuple(
            GroupedPart(
                in_features,
                out_features,
                bias,
                return_bias=return_bias,
                delay_wgrad_compute=delay_wgrad_compute,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                tp_size=tp_size,
                parallel_mode=parallel_mode,
                name=f"{self.name}.gemm_{i}",
                **arguments,
            )
            for i in range(num_gemms)
        )
        self._adopt()

    @property
    def name(self) -> str:
        """The layer's name, for messages, reports and the debugger. It may be set at any time."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        for i, part in enumerate(self._parts):
            part.name = f"{name}.gemm_{i}"

    @property
    def scaling(self) -> dict[str, ScalingState]:
        """The scaling state of all parts, side by side; empty where there is none."""
        if not self._parts or not all(part.scaling for part in self._parts):
            return {}
        return {
            direction: _joined([part.scaling[direction] for part in self._parts])
            for direction in (FORWARD, BACKWARD)
        }

    @scaling.setter
    def scaling(self, scaling: dict[str, ScalingState]) -> None:
        for i, part in enumerate(self._parts):
            part.scaling = {
                direction: _cut(state, i, len(self._parts)) for direction, state in scaling.items()
            }
            part.drop_plans()

    def is_built(self) -> bool:
        """See `HasSettings`."""
        return "_parts" in self.__dict__

    def rebuild_chain(self) -> None:
        """Pass `sequence_parallel` on to the parts, which have the chains."""
        self.ranks.sequence = self.sequence_parallel
        for part in self._parts:
            part.sequence_parallel = self.sequence_parallel

    def train(self, mode: bool = True) -> GroupedLinear:
        """Set the mode of the parts too: the debugger keeps statistics of evaluation separate."""
        for part in self._parts:
            part.train(mode)
        return super().train(mode)

    def parts(self) -> tuple[Linear, ...]:
        """One Linear for each part."""
        return self._parts

    def _names(self) -> Iterable[tuple[Linear, str, str]]:
        """Part, name of a parameter in the part, name of the same parameter here; weights first."""
        for kind in ("weight", "bias") if self.use_bias else ("weight",):
            for i, part in enumerate(self._parts):
                yield part, kind, f"{kind}{i}"

    def _adopt(self) -> None:
        """Take over the parameters of the parts, which have registered them."""
        self._parameter_set: Any = ParameterSetsOfParts(self._parts)
        for part, inside, here in self._names():
            self._parameters[here] = part._parameters[inside]

    def _lend(self) -> None:
        """Give the parts the current parameters of this module, for a call.

        Tensors that `torch.nn.utils.parametrize` computes become attributes of the parts until
        `_take_back`.
        """
        for part, inside, here in self._names():
            own = getattr(self, here)
            if own is not None and not isinstance(own, nn.Parameter):
                part._parameters.pop(inside, None)
                part.__dict__[inside] = own
            elif part._parameters.get(inside) is not own:
                part.register_parameter(inside, own)

    def _replicate_for_data_parallel(self) -> GroupedLinear:
        # Threads run replicas at the same time, and each call lends its own parameters.
        replica = super()._replicate_for_data_parallel()
        parts = [part._replicate_for_data_parallel() for part in self._parts]
        for part, own in zip(self._parts, parts, strict=True):
            own._parameters = dict.fromkeys(part._parameters)
        replica._parts = tuple(parts)
        return replica

    def _take_back(self) -> None:
        """Drop tensors that were computed for this call, and their graphs with them."""
        for part, inside, _ in self._names():
            if inside in part.__dict__:
                delattr(part, inside)
                part._parameters[inside] = None

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise anew; parameters on meta get memory first. With `defer_init` do nothing."""
        if not defer_init:
            self._lend()
            for part in self._parts:
                part.reset_parameters()
            self._adopt()

    def _compute_delayed(self) -> None:
        self._lend()
        for part in reversed(self._parts):
            part.backward_dw()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        """Load without the entries `_extra_state1`, ..., in which Megatron-Core repeats FP8 state.

        The first entry is enough. A hook of Megatron-Core, which runs later, would unpickle the
        others.
        """
        repeated = {f"{prefix}_extra_state{i}" for i in range(1, self.num_gemms)}
        own = {key: value for key, value in state_dict.items() if key not in repeated}
        super()._load_from_state_dict(own, prefix, *others)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor parallel group; see `Linear`."""
        super().set_tensor_parallel_group(tp_group)
        for part in self._parts:
            part.set_tensor_parallel_group(tp_group)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for part in self._parts:
            part.drop_plans()
        return self

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Apply each part's transformation to its rows.

        Args:
            inp: `(..., in_features)`; its leading sizes count as rows.
            m_splits: how many rows each part gets, in order; it may be zero.
            is_first_microbatch: see `Linear.forward`.

        Returns:
            `(..., out_features)`, and with `return_bias` the list of biases.

        Raises:
            ValueError: `m_splits` has not one number for each part, or they do not add up.
            TypeError: an FP8 tensor as input; numbers of rows that are not ints.
        """
        check_plain("GroupedLinear", self.name, inp=inp)
        check_features(self, inp, self.in_features)
        splits = list_of_ints("GroupedLinear", self.name, m_splits=m_splits)
        rows = inp.reshape(-1, self.in_features)
        if len(splits) != self.num_gemms or sum(splits) != rows.shape[0] or min(splits) < 0:
            raise ValueError(
                f"[GroupedLinear] expected m_splits to be {self.num_gemms} numbers of rows that "
                f"add up to {rows.shape[0]}, got {splits} (layer {self.name})"
            )
        self._lend()
        try:
            results = self._run(rows.split(splits), is_first_microbatch)
        finally:
            self._take_back()
        returns_bias = self.return_bias
        outputs = [result[0] for result in results] if returns_bias else results
        out = torch.cat(outputs).view(*inp.shape[:-1], self.out_features)
        return (out, [bias for _, bias in results]) if returns_bias else out

    def _run(self, values: Sequence[torch.Tensor], is_first_microbatch: bool | None) -> list[Any]:
        """What each part returns: as one node of autograd's graph, or part by part."""
        group = {"is_first_microbatch": is_first_microbatch}
        if not torch.compiler.is_compiling():
            largest = max(values, key=torch.Tensor.numel)
            found = run_as_one(self, _names_of_rows(len(values)), values, largest, (group,))
            if found is not NotImplemented:
                return list(found) if len(values) > 1 else [found]
        return list(self.data_flow(EAGER, values, group))

    def data_flow(
        self, flow: Flow, values: Sequence[Any], group: dict[str, Any]
    ) -> tuple[Any, ...]:
        """See `chain.flow`: the values are the rows of each part."""
        parts = zip(self._parts, values, strict=True)
        return tuple([flow.call(part, own, **group) for part, own in parts])

    @staticmethod
    def flow_key() -> Hashable:
        """See `chain.flow`."""
        return ()


@lru_cache
def _names_of_rows(parts: int) -> tuple[str, ...]:
    return tuple([f"rows{i}" for i in range(parts)])


def _joined(states: list[ScalingState]) -> ScalingState:
    scale = torch.cat([state.scale for state in states])
    length = max([state.length for state in states])  # frozen parts may keep another one
    history = torch.cat([of_length(state.amax_history, length) for state in states], dim=1)
    return state_with(states[0].direction, scale, history)


def _cut(state: ScalingState, index: int, count: int) -> ScalingState:
    columns = state.scale.numel() // count
    own = slice(index * columns, (index + 1) * columns)
    return state_with(state.direction, state.scale[own].clone(), state.amax_history[:, own].clone())
