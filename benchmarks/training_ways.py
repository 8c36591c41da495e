"""The ways in which ranks share a training of bench_training_ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contenders import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_models import Architecture, Model
from training_steps import LARGEST_NORM, OneGpu, Row, build

import transformer_engine.pytorch as te


def own_part(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's part of `x`, which is divided along `dim` into equal parts for all ranks."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Replicas(OneGpu):
    """Each rank has the whole model and its own sequences (DDP)."""

    def wrap(self, model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def own(self, data: torch.Tensor) -> torch.Tensor:
        return own_part(data, 1).contiguous()


class Shards(Replicas):
    """Each rank has a shard of every weight and its own sequences (FSDP2)."""

    def wrap(self, model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
        return model


class SharedLayers(OneGpu):
    """Ranks shard layers, the vocabulary and, between layers, tokens (TP + SP)."""

    def build(self, row: Row, sizes: Architecture) -> Model:
        options = {"attn_input_format": "sbhd", "ub_tp_comm_overlap": True}
        model = build(row, sizes, kind=SharedModel, **options)
        of_tokens = [name for name in ("norm", "position") if getattr(model, name) is not None]
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))
        te.parallelize(model, mesh, dict.fromkeys(of_tokens, "tokens"), sequence_parallel=True)
        assert isinstance(model, SharedModel)
        model.share_words()
        return model

    def finish(self, model: Model) -> None:
        te.all_reduce_sequence_parallel_grads(model)

    def clip_factor(self, weights: list[nn.Parameter]) -> torch.Tensor:
        return te.optimizers.clip_factor(weights, LARGEST_NORM, dist.group.WORLD)[1]


class SharedModel(Model):
    """Our model after `te.parallelize`: `[sequence, batch, hidden]`, sharded along the sequence."""

    def share_words(self) -> None:
        """Shard embedding and head over the vocabulary."""
        tied = self.head is self.token.weight
        self.token.weight = self._part(self.token.weight)
        self.head = self.token.weight if tied else self._part(self.head)
        self.scatter = te.ops.ReduceScatter(dist.group.WORLD)
        self.loss = self._loss

    @staticmethod
    def _part(weight: torch.Tensor) -> nn.Parameter:
        part: Any = nn.Parameter(own_part(weight.detach()).clone())
        part.tensor_model_parallel = True
        return part

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed this rank's tokens; each rank looks up its part of the vocabulary for all."""
        rank, words = dist.get_rank(), self.token.weight.shape[0]
        tokens = tokens.t() - rank * words
        other = (tokens < 0) | (tokens >= words)
        x = self.token(tokens.masked_fill(other, 0)).masked_fill(other.unsqueeze(-1), 0.0)
        x = self.scatter(x)
        if self.position is None:
            return x
        return x + own_part(self.position.weight).unsqueeze(1)

    @staticmethod
    def _loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of all tokens, with a head that is sharded over the vocabulary."""
        group = dist.group.WORLD
        gathered = te.distributed.gather_along_first_dim(hidden.detach(), group)[0]
        parts = [*gathered.chunk(dist.get_world_size())]
        parts[dist.get_rank()] = hidden  # the loss sums its gradient over ranks
        return te.linear_cross_entropy(
            torch.cat(parts), weight, target.t(), dist_process_group=group
        )
