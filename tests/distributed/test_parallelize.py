"""`te.parallelize`: a model that ranks share, compared with the same model in one process."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallelize_ranks import OF_FOUR, SCENARIOS, scenarios
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import transformer_engine.pytorch as te
from transformer_engine.pytorch.parallelize.parallelize import _kinds

pytestmark = pytest.mark.timeout(300)  # starting processes takes long on a busy machine


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def two(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Returns for each of two ranks the traceback of each scenario that failed, or ""."""
    return run_ranks(2, scenarios, backend=request.param)


@pytest.fixture(
    scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu(4))]
)
def four(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Returns for each of four ranks the traceback of each scenario that failed, or ""."""
    return run_ranks(4, scenarios, backend=request.param)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_share_a_built_model(two: list[dict[str, str]], scenario: str) -> None:
    assert [found[scenario] for found in two] == [""] * 2


@pytest.mark.parametrize("scenario", OF_FOUR)
def test_four_ranks_share_a_built_model(four: list[dict[str, str]], scenario: str) -> None:
    assert [found[scenario] for found in four] == [""] * 4


def test_plans_of_parts_of_layers_are_refused() -> None:
    """They are not skipped: all parts of a layer follow the plan of the layer."""
    layer = te.TransformerLayer(32, 64, 2, device="cpu")
    model = torch.nn.ModuleDict({"layer": layer, "proj": te.Linear(32, 32, device="cpu")})
    for entry in ("layer.layernorm_mlp", "layer*.proj"):
        with pytest.raises(ValueError, match=re.escape(f"not parts of shared ones, got ['{entry}")):
            [*_kinds(model, {entry: "row"})]
    kinds = [(name, kind) for name, _, kind in _kinds(model, {"*proj": "row"})]
    assert kinds == [("layer", "layer"), ("proj", "row")]


@pytest.mark.parametrize("plan", [[("up", "column")], "column", []], ids=["pairs", "str", "empty"])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        text = rf"^\[parallelize\] expected plan to be a mapping .*, got {type(plan).__name__}$"
        with pytest.raises(TypeError, match=text):
            te.parallelize(te.Linear(16, 16, device="cpu"), mesh, plan)
    finally:
        dist.destroy_process_group()


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^\[parallelize\] expected .*, got Linear and NoneType"):
        te.parallelize(torch.nn.Linear(2, 2), None)
