"""Parameters that parametrisations or FSDP compute, and parameters that are not contiguous."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from debug_session import debugging, logged, section
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "split": lambda: te.Linear(32, 32, device="cpu", parameters_split=("a", "b")),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 32, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 32, 2, device="cpu", hidden_dropout=0.0, attention_dropout=0.0
    ),
    "BasicLinear": lambda: te.ops.BasicLinear(32, 32, device="cpu"),
    "Bias": lambda: te.ops.Bias(32, device="cpu"),
}
RECIPES = [None, DelayedScaling(amax_history_len=3), Float8CurrentScaling()]
each_recipe = pytest.mark.parametrize(
    "recipe", RECIPES, ids=["fp32", "DelayedScaling", "Float8CurrentScaling"]
)


def run(module: nn.Module, x: torch.Tensor, recipe: Any) -> torch.Tensor:
    """Run forward and backward, and return the output."""
    module.zero_grad()
    grouped = "Grouped" in type(getattr(module, "module", module)).__name__
    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = module(x, [x.shape[0] * x.shape[1] // 2] * 2) if grouped else module(x)
    y.square().sum().backward()
    return y.detach()


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


def parametrized(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Same())


WAYS = {
    "parametrize": parametrized,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "prune": lambda module, name: prune.l1_unstructured(module, name, 1),
}


def compute(module: nn.Module, way: str) -> None:
    """Apply `way` to each parameter; only "parametrize" applies to vectors too."""
    for inner in list(module.modules()):
        for name, parameter in list(inner._parameters.items()):
            if parameter is not None and (parameter.ndim == 2 or way == "parametrize"):
                WAYS[way](inner, name)


@each_recipe
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODULES)
def test_every_parameter_gets_a_gradient(kind: str, way: str, recipe: Any) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    compute(module, way)
    for _ in range(2):
        run(module, torch.randn(8, 4, 32), recipe)
    assert all(p.grad is not None for p in module.parameters())
    module.load_state_dict(module.state_dict())


@each_recipe
@pytest.mark.parametrize("kind", MODULES)
def test_parameters_that_are_computed_change_nothing(kind: str, recipe: Any) -> None:
    torch.manual_seed(0)
    plain = MODULES[kind]()
    other = copy.deepcopy(plain)
    compute(other, "parametrize")
    for _ in range(3):
        x = torch.randn(8, 4, 32)
        assert torch.equal(run(plain, x, recipe), run(other, x, recipe))
    ours = {name.rsplit(".", 1)[0]: p.grad for name, p in other.named_parameters()}
    for name, parameter in plain.named_parameters():
        path, _, last = name.rpartition(".")
        where = f"{path}.parametrizations.{last}".removeprefix(".")
        assert torch.equal(ours[where], parameter.grad), name


@each_recipe
@pytest.mark.parametrize("kind", MODULES)
def test_copies_run(kind: str, recipe: Any) -> None:
    torch.manual_seed(0)
    module, x = MODULES[kind](), torch.randn(8, 4, 32)
    compute(module, "parametrize")
    run(module, x, recipe)
    twin = copy.deepcopy(module)
    assert torch.equal(run(twin, x, recipe), run(module, x, recipe))


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous: a matrix in column-major order, a vector with gaps."""
    if x.ndim == 2:
        return x.t().contiguous().t()
    return torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]


def with_strides(module: nn.Module, at_once: bool) -> None:
    """Change the strides of each parameter: set a new parameter, or set only its `data`."""
    for inner in module.modules():
        for name, parameter in list(inner._parameters.items()):
            if parameter is not None and at_once:
                setattr(inner, name, nn.Parameter(strided(parameter.detach())))
            elif parameter is not None:
                parameter.data = strided(parameter.data)


@each_recipe
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_strides_of_parameters_change_nothing(kind: str, at_once: bool, recipe: Any) -> None:
    torch.manual_seed(0)
    plain = MODULES[kind]()
    other = copy.deepcopy(plain)
    x = torch.randn(8, 4, 32)
    if not at_once:
        run(plain, x, recipe), run(other, x, recipe)
    with_strides(other, at_once)
    for _ in range(2):
        assert torch.equal(run(plain, x, recipe), run(other, x, recipe))
    for mine, own in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, own.grad)


@each_recipe
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", ""])
@pytest.mark.parametrize("fused", [True, False], ids=["main_grad", ""])
def test_strides_of_weights_whose_gradients_go_elsewhere(
    fused: bool, delayed: bool, recipe: Any
) -> None:
    torch.manual_seed(0)
    options: Any = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delayed}
    plain = te.LayerNormMLP(32, 48, device="cpu", **options)
    other = copy.deepcopy(plain)
    with_strides(other, True)
    x, found = torch.randn(16, 32), []
    for module in (plain, other):
        for p in module.parameters():
            p.main_grad = torch.zeros(p.shape)
        for first in (True, False):
            with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                module(x, is_first_microbatch=first).square().sum().backward()
            if delayed:
                module.backward_dw()
        found.append([g for p in module.parameters() for g in (p.grad, p.main_grad)])
    for mine, own in zip(*found, strict=True):
        assert (mine is None and own is None) or torch.equal(mine, own)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=["fp32", "DelayedScaling"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_strides_of_parameters_in_compiled_code(kind: str, recipe: Any) -> None:
    torch.manual_seed(0)
    plain = MODULES[kind]()
    other = copy.deepcopy(plain)
    with_strides(other, True)
    compiled = torch.compile(other, backend="aot_eager")
    x = torch.randn(8, 4, 32)
    for _ in range(2):
        assert torch.equal(run(plain, x, recipe), run(compiled, x, recipe))
    for mine, own in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, own.grad)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _flat(module: nn.Module) -> FullyShardedDataParallel:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(module, use_orig_params=False, device_id=cpu)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Linear", "split", "LayerNormMLP", "GroupedLinear"])
def test_flat_parameters_of_fsdp_in_a_session(kind: str, tmp_path: Path) -> None:
    module = MODULES[kind]()
    sharded = _flat(module if kind == "GroupedLinear" else nn.Sequential(module))
    with debugging(tmp_path, section("LogTensorStats", tensors=["weight"], stats=["max"])):
        run(sharded, torch.randn(8, 4, 32), None)
        debug_api.step()
    assert len(logged(tmp_path)) == len(module.gemm_names)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_dtype_with_flat_parameters_of_fsdp() -> None:
    sharded = _flat(nn.Sequential(MODULES["TransformerLayer"]()))
    with pytest.raises(TypeError, match=r"must match when outside of torch\.autocast: "):
        sharded(torch.randn(8, 4, 32, dtype=torch.float16))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@each_recipe
@pytest.mark.parametrize("kind", MODULES)
def test_flat_parameters_of_fsdp(kind: str, recipe: Any) -> None:
    torch.manual_seed(0)
    plain = MODULES[kind]()
    sharded = _flat(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (plain, sharded)]
    for _ in range(3):
        x = torch.randn(8, 4, 32)
        assert torch.equal(run(plain, x, recipe), run(sharded, x, recipe))
        for optimizer in optimizers:
            optimizer.step()
    sharded.load_state_dict(sharded.state_dict())
