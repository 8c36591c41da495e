"""What each rank of distributed/test_shards runs: fully_shard, and FullyShardedDataParallel."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_device import here
from replica_reference import (
    HIDDEN,
    PAIRS,
    RECIPES,
    alone,
    differences,
    make,
    micro_batch,
    one_process,
    one_rank,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Recipe

Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "FusedAdam": lambda parameters: te.optimizers.FusedAdam(
        parameters, lr=1e-2, master_weights=True
    ),
    "FusedSGD": lambda parameters: te.optimizers.FusedSGD(parameters, lr=0.1, momentum=0.9),
    "SGD one by one": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, foreach=False
    ),
}


FLAT = [
    (layer, one) for layer in ("GroupedLinear", "TransformerLayer") for one in ("bf16", "delayed")
]


def _made(layer: str, recipe: Recipe | None, fp8_weights: bool, **options: Any) -> nn.Module:
    with te.quantized_model_init(fp8_weights, recipe=recipe, **options):
        return make(layer)


def _fully_sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Applies `fully_shard` to the attention and MLP modules, then to the rest of the model."""
    for part in (*_parts(model), model):
        fully_shard(part, mesh=mesh, **options)
    return model


def _parts(model: nn.Module) -> list[nn.Module]:
    kinds = te.LayerNormMLP | te.MultiheadAttention
    return [m for m in model.modules() if isinstance(m, kinds) and m is not model]


def _observed(model: nn.Module) -> nn.Module:
    """A model whose parts have hooks, so that residuals are added as in `_fully_sharded`."""
    for part in _parts(model):
        part.register_forward_hook(lambda *_: None)
    return model


def _case(
    layer: str,
    precision: str,
    rank: int,
    group: Any,
    fp8_weights: bool = False,
    optimizer: str = "SGD",
    **options: Any,
) -> dict[str, Any]:
    recipe, make_optimizer = RECIPES[precision], OPTIMIZERS[optimizer]
    keep = {"preserve_high_precision_init_val": optimizer == "FusedAdam"}
    model, reference = (_made(layer, recipe, fp8_weights, **keep) for _ in range(2))
    _fully_sharded(model, options.pop("mesh"), **options)
    _observed(reference)
    losses = one_rank(model, recipe, rank, make_optimizer(model.parameters()))
    if optimizer == "FusedSGD":  # the kernel of FusedSGD takes no DTensors
        make_optimizer = OPTIMIZERS["SGD one by one"]
    expected = one_process(reference, recipe, group, make_optimizer(reference.parameters()))
    return {"losses": losses, "expected": expected, "differences": differences(model, reference)}


def _flat(layer: str, precision: str, rank: int, group: Any, original: bool) -> dict[str, Any]:
    """Trains under FullyShardedDataParallel, whose parameters are flat."""
    recipe, make_optimizer = RECIPES[precision], OPTIMIZERS["SGD"]
    model, reference = make(layer), make(layer)
    wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=here())
    losses = one_rank(wrapped, recipe, rank, make_optimizer(wrapped.parameters()))
    expected = one_process(reference, recipe, group, make_optimizer(reference.parameters()))
    with FullyShardedDataParallel.summon_full_params(wrapped):
        different = differences(model, reference)
    return {"losses": losses, "expected": expected, "differences": different}


def _mixed(precision: str, rank: int, group: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Trains fp32 parameters that are gathered in bf16; gradients are reduced in fp32."""
    recipe, rate = RECIPES[precision], 0.1
    model, reference = make("TransformerLayer", dtype=torch.float32), make("TransformerLayer")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _fully_sharded(model, mesh, mp_policy=policy)
    _observed(reference)
    losses = one_rank(model, recipe, rank, torch.optim.SGD(model.parameters(), lr=rate))
    expected = one_process(reference, recipe, group, _Fp32Masters(reference, rate), in_fp32=True)
    return {"losses": losses, "expected": expected}


class _Fp32Masters:
    """SGD that keeps fp32 masters of bf16 parameters, and reads gradients from `main_grad`."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        masters = dict(make("TransformerLayer", dtype=torch.float32).named_parameters())
        self.pairs = [(p, masters[name].detach()) for name, p in model.named_parameters()]
        self.rate = rate
        with torch.no_grad():  # releases of torch draw different bf16 numbers
            for parameter, master in self.pairs:
                parameter.copy_(master)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self.pairs:
            master.sub_(parameter.main_grad, alpha=self.rate)
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None


class Collectives(TorchDispatchMode):
    """Records the name and the bytes of each collective that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.seen.append((func._schema.name.removeprefix("c10d::"), tensors[-1].nbytes))
        return func(*args, **(kwargs or {}))


def _gathered(fp8_weights: bool, mesh: DeviceMesh) -> int:
    """Returns the bytes that one rank contributes to the gather of a weight."""
    with te.quantized_model_init(fp8_weights):
        model = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device=here())
    fully_shard(model, mesh=mesh)
    with Collectives() as found:
        model.unshard()
    model.reshard()
    return sum(count for _, count in found.seen)


def _collectives_of_a_step(name: str, mesh: DeviceMesh) -> int:
    """Counts an optimizer's all-reduces for the four FP8 weights of a layer."""
    model = _made("TransformerLayer", None, True)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(micro_batch(0, 0, 0)).sum().backward()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        optimizer.step()
    return reduce.call_count


def _clipped(capturable: bool, mesh: DeviceMesh) -> dict[str, float]:
    """Returns the norm of all gradients, and the weight after a step with the clip factor."""
    found = {}
    for way in ("cut", "whole"):
        torch.manual_seed(0)
        model = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.float32, device=here())
        if way == "cut":
            fully_shard(model, mesh=mesh)
        model(micro_batch(0, 0, 0).float()).square().sum().backward()
        norm, factor = te.optimizers.clip_factor(model.parameters(), 1.0)
        optimizer = te.optimizers.FusedAdam(model.parameters(), eps=1.0, capturable=capturable)
        optimizer.step(grad_factor=factor)
        weight = model.weight.full_tensor() if way == "cut" else model.weight
        found |= {f"{way} norm": norm.item(), f"{way} weight": weight.double().sum().item()}
    return found


def _from_meta(fp8_weights: bool, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Trains a layer that was sharded on the meta device, before it had memory."""
    torch.manual_seed(rank)
    with te.quantized_model_init(fp8_weights):
        model = te.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="meta")
    fully_shard(model, mesh=mesh)
    model.reset_parameters()
    y = model(micro_batch(0, 0, rank))
    loss = y.float().square().mean()
    loss.backward()
    weight = model.weight
    return {
        "kind": type(weight.to_local()).__name__,
        "std": weight.full_tensor().float().std().item(),
        "loss": loss.item(),
        "norm": model.layer_norm_weight.full_tensor().float().mean().item(),
    }


def _errors(mesh: DeviceMesh) -> dict[str, str]:
    """Returns the messages about shards that are written too early, or that split FP8 blocks."""
    found = {}
    model = _made("Linear", None, True)
    fully_shard(model, mesh=mesh)
    try:
        with torch.no_grad():
            model.weight.mul_(2.0)
    except RuntimeError as error:
        found["too early"] = str(error)
    with (
        te.quantized_model_init(recipe=Float8BlockScaling()),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        small = te.Linear(HIDDEN, 128, params_dtype=torch.bfloat16, device=here(), name="small")
        fully_shard(small, mesh=mesh)
        found["blocks"] = " ".join(str(one.message) for one in said)
    return found


@torch.no_grad()
def _slices(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Writes to some rows of an FP8 shard, and compares the weight with expected values."""
    model = _made("Linear", None, True)
    fully_shard(model, mesh=mesh)
    model(micro_batch(0, 0, rank))
    model.reshard()
    before = model.weight.full_tensor().dequantize()
    piece = model.weight.to_local()
    found: dict[str, Any] = {}
    try:
        piece[:4].mul_(0.25)
    except RuntimeError as error:
        found["error"] = str(error)
    found["kept"] = torch.equal(model.weight.full_tensor().dequantize(), before)
    before[:4] *= 4
    piece[:4] = piece[:4].dequantize() * (1 if rank else 4)
    torch.testing.assert_close(
        model.weight.full_tensor().dequantize(), before, rtol=0.07, atol=1e-2
    )
    return found


def _whole_state(broadcast: bool, rank: int, mesh: DeviceMesh) -> float:
    """The largest change of a weight when whole tensors are loaded into FP8 pieces."""
    with te.fp8_model_init():
        source = te.Linear(HIDDEN, HIDDEN, device=here())
        model = _fully_sharded(te.Linear(HIDDEN, HIDDEN, device=here()), mesh)
    model.load_state_dict(model.state_dict())  # torch writes to pieces, whose ranks are known now
    state = source.state_dict()
    dist.broadcast(state["weight"], 0)
    loaded = {} if broadcast and rank else dict(state)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, loaded, options=options)
    weight = get_model_state_dict(model)["weight"].full_tensor()
    return float((weight - state["weight"]).abs().max())


def shards(rank: int) -> dict[str, Any]:
    """Returns the result of every case, by name."""
    group, mesh = alone(rank), init_device_mesh(here().type, (2,))
    found: dict[str, Any] = {}
    for layer, precision in PAIRS:
        found[f"{layer} {precision}"] = _case(layer, precision, rank, group, mesh=mesh)
        if precision != "bf16":
            found[f"{layer} {precision}, FP8 weights"] = _case(
                layer, precision, rank, group, True, mesh=mesh
            )
        if (layer, precision) in FLAT:
            for original in (True, False):
                found[f"flat {layer} {precision} {original}"] = _flat(
                    layer, precision, rank, group, original
                )
    for precision in RECIPES:
        found[f"mixed {precision}"] = _mixed(precision, rank, group, mesh)
    for name in OPTIMIZERS:
        for fp8_weights in (False, True):
            key = f"{name}{', FP8 weights' if fp8_weights else ''}"
            if fp8_weights or not name.startswith("SGD"):
                found[key] = _case(
                    "LayerNormMLP", "current", rank, group, fp8_weights, name, mesh=mesh
                )
    found["kept"] = _case(
        "TransformerLayer", "delayed", rank, group, True, mesh=mesh, reshard_after_forward=False
    )
    found["bytes"] = {fp8_weights: _gathered(fp8_weights, mesh) for fp8_weights in (False, True)}
    found["collectives"] = {
        name: _collectives_of_a_step(name, mesh) for name in OPTIMIZERS if "Adam" in name
    }
    found["clipped"] = {one: _clipped(one, mesh) for one in (False, True)}
    found["from meta"] = {one: _from_meta(one, rank, mesh) for one in (False, True)}
    found["whole state"] = {one: _whole_state(one, rank, mesh) for one in (False, True)}
    found["errors"] = _errors(mesh)
    found["slices"] = _slices(rank, mesh)
    return found


def initial_values(rank: int) -> dict[str, list[bool]]:
    """Checks the high-precision initial values of FP8 shards, made with memory and on meta.

    Each result says: whether the FP8 shard differs from the initial values; whether the master
    weight equals them at first, after it was set from them, and after a step with learning rate 0;
    and whether they were cleared.
    """
    found = {}
    for device, rows in itertools.product((here().type, "meta"), (32, 48)):
        with te.quantized_model_init(preserve_high_precision_init_val=True):
            model = te.Linear(64, rows, False, params_dtype=torch.float32, device=device)
        fully_shard(model, mesh=init_device_mesh(here().type, (dist.get_world_size(),)))
        if device == "meta":
            model.reset_parameters()
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=0.0, master_weights=True)
        weight: Any = model.weight
        optimizer.initialize_state(weight)
        piece: Any = weight._local_tensor  # as examples of NVIDIA's package read it
        initial = piece.get_high_precision_init_val().to(here())
        masters = [optimizer.state[weight]["master_param"].to_local().clone()]
        optimizer.set_scaled_state(weight, "master_param", initial)
        masters.append(optimizer.state[weight]["master_param"].to_local().clone())
        piece.clear_high_precision_init_val()
        model(torch.randn(16, 64, device=here())).sum().backward()
        optimizer.step()
        masters.append(optimizer.state[weight]["master_param"].to_local())
        found[f"{device} {rows}"] = [
            not torch.equal(piece.dequantize(), initial) or not initial.numel(),
            *(torch.equal(master, initial) for master in masters),
            weight._local_tensor.get_high_precision_init_val() is None,
        ]
    return found


def uneven(rank: int) -> dict[int, bool]:
    """Whether a layer with this many rows, sharded over five ranks, agrees with one process."""
    found = {}
    for rows in (32, 16):  # the last rank has fewer rows than others, or none
        layers = []
        for _ in range(2):
            torch.manual_seed(0)
            with te.quantized_model_init():
                layers.append(te.Linear(HIDDEN, rows, bias=False, device=here()))
        fully_shard(layers[0], mesh=init_device_mesh(here().type, (5,)))
        x = micro_batch(0, 0, 0).float()
        for layer in layers:
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            layer(x).square().mean().backward()
            optimizer.step()
        ours, theirs = (layer(x) for layer in layers)
        found[rows] = torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    return found


def hybrid(rank: int) -> dict[str, Any]:
    """Trains replicas of a layer; two of four ranks shard each replica."""
    found = {}
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("replica", "shard"))
    group = alone(rank)
    for precision, fp8_weights in (("delayed", True), ("bf16", False)):
        recipe = RECIPES[precision]
        model, reference = (_made("TransformerLayer", recipe, fp8_weights) for _ in range(2))
        _fully_sharded(model, mesh)
        _observed(reference)
        optimizers = [OPTIMIZERS["SGD"](one.parameters()) for one in (model, reference)]
        # Replicas get the same data, so the mean over all ranks is the mean over one pair.
        losses = one_rank(model, recipe, mesh["shard"].get_local_rank(), optimizers[0])
        expected = one_process(reference, recipe, group, optimizers[1])
        found[precision] = {
            "losses": losses,
            "expected": expected,
            "differences": differences(model, reference),
        }
    return found
