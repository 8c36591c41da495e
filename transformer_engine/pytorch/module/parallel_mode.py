"""How tensor parallel ranks share a Linear: sizes, attributes of parameters, stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from transformer_engine.pytorch.chain.stage import Stage
from transformer_engine.pytorch.chain.stages import Matmul
from transformer_engine.pytorch.chain.stages.collective import before_columns, behind_rows
from transformer_engine.pytorch.module.parameters import InitMethod, ParameterSpec
from transformer_engine.pytorch.parallel.groups import TensorParallel
from transformer_engine.pytorch.parallel.shards import Shard

PARALLEL_MODES = (None, "column", "row")


def parallel_mode_of(parallel_mode: str | None, module: str) -> str | None:
    """`column`, `row` or None, whatever the case of the argument."""
    mode = parallel_mode.lower() if isinstance(parallel_mode, str) else parallel_mode
    if mode not in PARALLEL_MODES:
        raise ValueError(
            f"[{module}] parallel_mode {parallel_mode!r} not supported: expected None, 'column' or "
            "'row'"
        )
    return mode


def weight_attributes(parallel_mode: str | None) -> dict[str, Any]:
    """The attributes of a weight that tensor-parallel trainers read."""
    dim = 1 if parallel_mode == "row" else 0
    return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}


def value_for_each_head(name: str, heads: int, ranks: TensorParallel) -> ParameterSpec:
    """A parameter with one value, initially zero, for each head of a rank."""
    attributes = weight_attributes("column") if ranks.size > 1 else {}
    return ParameterSpec(name, (heads,), nn.init.zeros_, attributes, shard=Shard(ranks, 0))


class SharedLinear:
    """A Linear that ranks share by columns, by rows, or not at all.

    By columns each rank has some of the outputs, by rows it has some of the inputs, and the
    outputs are sums over the ranks.

    Args:
        mode: `column`, `row` or None.
        ranks: the ranks that share the layer.
        out_sections: sizes of sections along the outputs of the whole weight, such as query, key
            and value; each section is divided among the ranks. () stands for one section.
        delays: `backward_dw` computes the gradients of the parameters.
        joins: add collectives; otherwise the caller gathers inputs and sums outputs.
    """

    def __init__(
        self,
        mode: str | None,
        ranks: TensorParallel,
        out_sections: Sequence[int] = (),
        delays: bool = False,
        joins: bool = True,
    ) -> None:
        self.mode = mode
        self.ranks = ranks
        self.out_sections = out_sections
        self.delays, self.joins = delays, joins
        # Tells trainers that hooks on gradients must wait for `backward_dw`.
        self._marks = {"skip_backward_post_hook": True} if delays else {}

    def outputs(self, what: str, count: int) -> int:
        """The outputs of one rank. Raises ValueError if ranks cannot share them equally."""
        return self.ranks.share(what, count) if self.mode == "column" else count

    def inputs(self, what: str, count: int) -> int:
        """The inputs of one rank. Raises ValueError if ranks cannot share them equally."""
        return self.ranks.share(what, count) if self.mode == "row" else count

    def weight(self, name: str, shape: tuple[int, int], init: InitMethod) -> ParameterSpec:
        """A weight of this shape on each rank."""
        shard = None
        if self.mode is not None and self.ranks.size > 1:
            shard = Shard(self.ranks, 1 if self.mode == "row" else 0, self.out_sections)
        attributes = {**weight_attributes(self.mode), **self._marks}
        return ParameterSpec(name, shape, init, attributes, True, True, shard)

    def bias(self, name: str, size: int, announced: bool = True) -> ParameterSpec:
        """The bias: a shard, or replicated with gradients from the rank's own tokens.

        It has `size` elements on each rank. If `announced`, a replicated bias has the attribute
        `sequence_parallel`.
        """
        attributes: dict[str, Any] = {}
        shard = None
        if self.mode == "column":
            attributes = weight_attributes("column")
            if self.ranks.size > 1:
                shard = Shard(self.ranks, 0, self.out_sections)
        elif self.mode == "row" and announced:
            attributes = {"sequence_parallel": self.ranks.sequence}
        attributes = {**attributes, **self._marks}
        return ParameterSpec(name, (size,), nn.init.zeros_, attributes, shard=shard)

    def stages(
        self,
        index: int,
        layer: str,
        fuse_wgrad: bool,
        part: str = "",
        gathered_tap: bool = False,
        save_original_input: bool = False,
    ) -> list[Stage]:
        """The Matmul, with the collectives before and after it.

        For the arguments see `Matmul`; with `gathered_tap` the chain also returns the gathered
        input.
        """
        before: list[Stage] = []
        behind: list[Stage] = []
        if self.mode == "column" and self.joins:
            before = before_columns(self.ranks, index, gathered_tap)
        elif self.mode == "row" and self.joins:
            behind = behind_rows(self.ranks)
        by_rows = bool(behind) and self.ranks.sequence
        matmul = Matmul(index, layer, fuse_wgrad, part, not behind, self.delays, by_rows)
        matmul.save_original_input = save_original_input
        return [*before, matmul, *behind]
