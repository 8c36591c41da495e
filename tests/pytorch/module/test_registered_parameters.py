"""Parameters that are registered again: only those of another kind make a module drop its plans."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from recordings import recordings_made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

SIZE = 32


def linear(
    fp8: bool = False, features: int = SIZE, dtype: torch.dtype = torch.bfloat16
) -> te.Linear:
    with te.quantized_model_init(fp8, recipe=Float8CurrentScaling()):
        return te.Linear(SIZE, features, params_dtype=dtype, device="cpu")


def called(module: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE)
    with te.autocast(recipe=Float8CurrentScaling()):
        return module(x.to(module.weight.dtype))


@pytest.mark.parametrize("fp8", [False, True])
def test_of_the_same_kind_keep_plans(fp8: bool) -> None:
    module, other = linear(fp8), linear(fp8)
    own = module.weight
    module.weight = own
    called(module)
    plans = dict(module._plans)
    module.weight = own
    assert dict(module._plans) == plans != {}
    module.bias = other.bias
    assert dict(module._plans) == plans
    module.register_parameter("weight", nn.Parameter(linear().weight.detach()))
    module.weight = other.weight
    assert torch.equal(called(module), called(other))


@pytest.mark.parametrize(
    "other",
    [
        lambda: linear(features=2 * SIZE),
        lambda: linear(dtype=torch.float32),
        lambda: linear(fp8=True),
    ],
    ids=["shape", "dtype", "FP8"],
)
def test_of_other_kinds_take_effect(other: Callable[[], te.Linear]) -> None:
    module, new = linear(), other()
    called(module)
    module.weight, module.bias = new.weight, new.bias
    assert torch.equal(called(module), called(new))


def test_of_another_recipe_are_checked() -> None:
    module = linear(fp8=True)
    called(module)
    with te.quantized_model_init(recipe=DelayedScaling()):
        module.weight = te.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="cpu").weight
    with pytest.raises(RuntimeError, match="Recipe mismatch for 'weight'"):
        called(module)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _cut(model: nn.Sequential) -> nn.Module:
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return model


def _flat(model: nn.Sequential) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("wrap", "fp8_weights"), [(_cut, False), (_cut, True), (_flat, False)])
def test_by_shards_record_in_the_first_steps_alone(
    wrap: Callable[[nn.Sequential], nn.Module], fp8_weights: bool, monkeypatch
) -> None:
    recipe = DelayedScaling()
    with te.quantized_model_init(fp8_weights, recipe=recipe):
        layers = [
            te.TransformerLayer(SIZE, 64, 2, params_dtype=torch.bfloat16, device="cpu")
            for _ in range(2)
        ]
    model = wrap(nn.Sequential(*layers))
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    made = recordings_made(monkeypatch)
    for step in range(4):
        x = torch.randn(8, 2, SIZE, dtype=torch.bfloat16)
        with te.autocast(recipe=recipe):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step < 2 or not made
        made.clear()
