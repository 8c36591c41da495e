"""What each rank of distributed/test_clip runs: norms and steps of distributed gradients."""

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attempts import failures
from rank_device import here
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam, clip_factor

# With the first shape, some ranks have no element; with others, some have fewer than the rest.
SHAPES = ((1, 3), (5, 4), (64, 300))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _mesh() -> DeviceMesh:
    names = ("outer", "inner")
    return init_device_mesh(here().type, (dist.get_world_size() // 2, 2), mesh_dim_names=names)


def _whole() -> Iterator[torch.Tensor]:
    """Yields gradients that are equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    for shape, dtype in product(SHAPES, DTYPES):
        yield torch.randn(shape, generator=generator).to(here(), dtype)


def _with(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _norm(gradients: list[torch.Tensor]) -> float:
    return float(torch.stack([x.double().norm() for x in gradients]).norm())


def _same_on_all(x: torch.Tensor) -> float:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    assert all(torch.equal(x, one) for one in found), found
    return float(x)


def _agrees(parameters: Any, expected: float, **options: Any) -> None:
    norm, factor = clip_factor(parameters, 2.0, **options)
    assert norm.dtype == factor.dtype == torch.float32
    assert norm.shape == factor.shape == ()
    assert _same_on_all(norm) == pytest.approx(expected, rel=1e-6)
    assert _same_on_all(factor) == pytest.approx(min(1.0, 2.0 / expected), rel=1e-5)


def placements(rank: int) -> None:
    """Shards along a dimension of the mesh add up to one norm; replicas count once."""
    mesh, whole, cut = _mesh(), [], []
    for one in _whole():
        for placed in product((Shard(0), Shard(1), Replicate()), repeat=2):
            whole.append(one)
            cut.append(_with(distribute_tensor(one, mesh, placed)))
        whole.append(one)
        cut.append(_with(one.clone()))  # also a plain tensor, equal on all ranks
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        _agrees(cut, _norm(whole))
    dtypes = 2  # one collective for the dtypes of the kernel, another for fp64
    assert reduce.call_count == dtypes * sum(size > 1 for size in mesh.shape)
    assert rank == 0 or not cut[0].grad.to_local().numel()


def summands(rank: int) -> None:
    """Gradients with Partial placements are summed over the ranks before the norm."""
    mesh, whole, cut = _mesh(), [], []
    for one in list(_whole())[::3]:
        for placed in ((Partial(), Replicate()), (Shard(0), Partial()), (Partial("avg"), Shard(1))):
            summed = [Replicate() if p.is_partial() else p for p in placed]
            local = distribute_tensor(one, mesh, summed).to_local()
            summand = DTensor.from_local(
                local, mesh, placed, run_check=False, shape=one.shape, stride=one.stride()
            )
            counts = [
                size if p.is_partial("sum") else 1
                for size, p in zip(mesh.shape, placed, strict=True)
            ]
            whole.append(one * counts[0] * counts[1])
            cut.append(_with(summand))
    _agrees(cut, _norm(whole))


def under_way(rank: int) -> None:
    """`clip_factor` waits for gradients whose collective has not finished."""
    whole = torch.full((4, 4), 2.0, device=here())
    cut = distribute_tensor(whole, _mesh(), [Shard(0), Shard(0)])
    sent = cut.redistribute(placements=[Replicate(), Replicate()], async_op=True)
    parameter = _with(sent)
    _agrees([parameter], 8.0)


def replicas_of_shards(rank: int) -> None:
    """With `fully_shard` on a 2D mesh there is one collective, over the ranks of one replica."""
    torch.manual_seed(0)
    model = nn.Sequential(*(te.Linear(24, 24, device=here()) for _ in range(2)))
    for part in (*model, model):
        fully_shard(part, mesh=_mesh())
    model(torch.randn(4, 24, device=here())).square().sum().backward()
    whole = [parameter.grad.full_tensor() for parameter in model.parameters()]
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        _agrees(model.parameters(), _norm(whole))
    assert reduce.call_count == 1
    norm = te.distributed.clip_grad_norm_(model, 0.1)
    assert _same_on_all(norm) == pytest.approx(_norm(whole), rel=1e-6)
    clipped = [parameter.grad.full_tensor() for parameter in model.parameters()]
    torch.testing.assert_close(clipped, [0.1 * one / norm for one in whole])


def shared_layers(rank: int) -> None:
    """Parts of tensor-parallel ranks add up to one norm; replicated parameters count once."""
    group, size = dist.group.WORLD, dist.get_world_size()
    whole, own = [], []
    for number, one in enumerate(_whole()):
        whole.append(one)
        own.append(_with(one.clone()))
        if number % 2:
            own[-1] = _with(one.tensor_split(size)[rank].clone())
            own[-1].tensor_model_parallel = True
        else:
            own[-1].grad += rank * 1e-3 * own[-1].grad  # as far apart as rounding makes replicas
    _agrees(own, _norm(whole), tp_group=group)
    replicated = [parameter for parameter in own if not hasattr(parameter, "tensor_model_parallel")]
    _agrees(replicated, _norm(whole[::2]), tp_group=group)
    _agrees(replicated[0], _norm(whole[:1]), tp_group=group)
    norm, factor = clip_factor([nn.Parameter(torch.ones(1))], 1.0, tp_group=group)
    assert norm == 0.0 and factor == 1.0
    with pytest.raises(TypeError, match=r"^\[clip_factor\] expected tp_group to be a process"):
        clip_factor(own, 1.0, tp_group="tp")


def sinks_of_shared_heads(rank: int) -> None:
    """Each rank has those of its heads, whether it is made so or cut later."""
    size = dist.get_world_size()
    group = {"tp_group": dist.group.WORLD, "tp_size": size}
    made = te.DotProductAttention(2 * size, 8, softmax_type="learnable", **group).to(here())
    cut = te.DotProductAttention(2 * size, 8, softmax_type="learnable").to(here())
    assert not hasattr(cut.softmax_offset, "tensor_model_parallel")
    mesh = init_device_mesh(here().type, (size,), mesh_dim_names=("tp",))
    te.parallelize(cut, mesh, {"": "heads"})
    for module in (made, cut):
        sinks = module.softmax_offset
        sinks.grad = torch.full_like(sinks, rank + 1.0)
        expected = sum(2 * (other + 1.0) ** 2 for other in range(size)) ** 0.5
        _agrees(sinks, expected, tp_group=dist.group.WORLD)
        assert (sinks.partition_dim, sinks.partition_stride) == (0, 1)


def shared_layers_that_are_cut_again(rank: int) -> None:
    """Tensor-parallel layers that `fully_shard` shards over the other dimension of the mesh."""
    mesh = _mesh()
    torch.manual_seed(1)
    alone = te.LayerNormMLP(32, 64, device=here())
    torch.manual_seed(1)
    model = te.LayerNormMLP(32, 64, device=here())
    shared = init_device_mesh(here().type, tuple(mesh.shape), mesh_dim_names=("dp", "tp"))
    te.parallelize(model, shared)
    cut = [getattr(p, "tensor_model_parallel", False) for p in model.parameters()]
    fully_shard(model, mesh=shared["dp"])
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).to(here())
    for one in (alone, model):
        one(x).square().sum().backward()
    group = shared["tp"].get_group()
    with pytest.raises(ValueError, match=r"^\[clip_factor\] expected DTensors with the attribute"):
        clip_factor(model.parameters(), 1.0, tp_group=group)
    for parameter, is_cut in zip(model.parameters(), cut, strict=True):
        parameter.tensor_model_parallel = is_cut
    expected = _norm([parameter.grad for parameter in alone.parameters()])
    _agrees(model.parameters(), expected, tp_group=group)
    norm = te.distributed.clip_grad_norm_(model, 1.0)
    assert _same_on_all(norm) == pytest.approx(expected, rel=1e-5)


def layers_of_torch_that_are_cut_again(rank: int) -> None:
    """Layers of torch's tensor parallelism: placements say all, with and without `tp_group`."""
    mesh = _mesh()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 24), nn.Linear(24, 12)).to(here())
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"])
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(2)).to(here())
    for one in (alone, model):
        one(x).square().sum().backward()
    expected = _norm([parameter.grad for parameter in alone.parameters()])
    _agrees(model.parameters(), expected)
    _agrees(model.parameters(), expected, tp_group=mesh["inner"].get_group())


def steps(rank: int) -> None:
    """Steps of sharded parameters, also with gradients that have other placements."""
    mesh, size = _mesh(), dist.get_world_size()
    placed = [(Shard(0), Shard(0)), (Replicate(), Shard(1)), (Replicate(), Replicate())]
    ways: list[dict[str, Any]] = [{}, {"capturable": True}, {"exp_avg_dtype": torch.bfloat16}]
    for way, dtype in product(ways, (torch.float32, torch.bfloat16)):
        expected, cut = nn.Parameter(torch.ones(6, 5, device=here(), dtype=dtype)), []
        expected.grad = torch.arange(30.0, device=here()).view(6, 5).to(dtype)
        for one in placed:
            cut.append(nn.Parameter(distribute_tensor(expected.detach().clone(), mesh, one)))
            cut[-1].grad = distribute_tensor(expected.grad, mesh, one)
        if "exp_avg_dtype" not in way:
            local = (expected.grad.float() / size).to(dtype)
            cut[-1].grad = DTensor.from_local(local, mesh, (Partial(), Partial()), run_check=False)
        versions = [parameter._version for parameter in cut]
        for parameters in ([expected], cut):
            optimizer = FusedAdam(parameters, lr=0.1, eps=1.0, master_weights=True, **way)
            for factor in (torch.full((), 0.5), torch.full((1,), 0.5)):
                optimizer.step(grad_factor=factor.to(here()))
        for parameter, before in zip(cut, versions, strict=True):
            torch.testing.assert_close(parameter.detach().full_tensor(), expected.detach())
            assert parameter._version > before


class _Tied(nn.Module):
    """Two branches that share one MLP, beside modules that ranks do not share."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": True, "device": here()}
        group = {"tp_group": dist.group.WORLD, "tp_size": dist.get_world_size()}
        self.plain = nn.Linear(8, 8, device=here())
        self.norm = te.LayerNorm(32, **options)
        mlp = te.LayerNormMLP(32, 64, set_parallel_mode=True, **group, **options)
        self.parts = nn.ModuleList([nn.Sequential(mlp), nn.Sequential(te.RMSNorm(32), mlp)])


def gradients_of_own_tokens(rank: int) -> None:
    """All-reduces each gradient of sequence-parallel parameters once, in one collective per dtype.

    Where a parameter has `main_grad`, that is reduced, not `grad`.
    """
    model = _Tied()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    model.norm.bias.main_grad = torch.full_like(model.norm.bias, 2.0 * rank, dtype=torch.float64)
    model.norm.weight.grad = model.norm.weight.grad.expand(3, -1).t()[:, 1]  # not contiguous
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        te.all_reduce_sequence_parallel_grads(model)
    assert reduce.call_count == 2
    size = dist.get_world_size()
    summed = float(sum(range(1, size + 1)))
    mlp = model.parts[0][0]
    for own in (model.norm.weight, mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.fc2_bias):
        assert own.grad.eq(summed).all()
    assert model.norm.bias.main_grad.eq(2.0 * (summed - size)).all()
    for other in (model.norm.bias, model.plain.weight, mlp.fc1_weight, mlp.fc1_bias):
        assert other.grad.eq(rank + 1.0).all()
    assert model.parts[1][0].weight.grad.eq(rank + 1.0).all()  # not marked as sequence-parallel


SCENARIOS = {
    run.__name__: run
    for run in (
        placements,
        summands,
        under_way,
        replicas_of_shards,
        shared_layers,
        sinks_of_shared_heads,
        shared_layers_that_are_cut_again,
        layers_of_torch_that_are_cut_again,
        steps,
        gradients_of_own_tokens,
    )
}


def scenarios(rank: int) -> dict[str, str]:
    """Returns for each scenario the traceback of its failure, "" where it passed."""
    return failures(SCENARIOS, rank)
