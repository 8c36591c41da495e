"""LogTensorStats called directly and in modules, against float64 torch."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from debug_session import debugging, inspect, logged, section
from precisions import RECIPES, scope
from recordings import recordings_made
from statistics_reference import ALL, assert_statistics, reference

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.debug.features.log_fp8_tensor_stats import LogFp8TensorStats
from transformer_engine.debug.features.log_tensor_stats import LogTensorStats

KINDS = ["activation", "gradient", "weight", "output", "wgrad", "dgrad"]


def everything(**more) -> dict:
    return section("LogTensorStats", **{"tensors": KINDS, "stats": list(ALL), **more})


def test_by_hand(tmp_path: Path, device: str) -> None:
    parts = [torch.randn(n, 16, device=device, dtype=torch.bfloat16) for n in (1, 33)]
    with debugging(tmp_path, everything()):
        for part in parts:
            inspect("decoder.1.fc1", "activation", part)
        debug_api.step()
    found = logged(tmp_path)[0, "decoder.1.fc1", "activation"]
    assert list(found) == list(ALL)
    assert_statistics(found, reference(*parts))


def test_lines_of_the_text_log(tmp_path: Path) -> None:
    config = section("LogTensorStats", tensors=["weight"], stats=["max", "min"])
    with debugging(tmp_path, config, log_timestamps=False):
        inspect("fc1", "weight", torch.tensor([1.5, -2.25]))
        debug_api.step()
        folder = tmp_path / "nvdlfw_inspect_statistics_logs"
        (file,) = folder.iterdir()
        lines = file.read_text().splitlines()
    tabs = " \t\t\t\t "
    assert [line[line.index("fc1") :] for line in lines] == [
        f"fc1_weight_max{tabs}iteration=000000{tabs}value=1.5000",
        f"fc1_weight_min{tabs}iteration=000000{tabs}value=-2.2500",
    ]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_session_that_never_steps_says_what_is_missing(tmp_path: Path, steps: int) -> None:
    with debugging(tmp_path, everything()):
        inspect("layer", "activation", torch.ones(2))
        for _ in range(steps):
            debug_api.step()
        inspect("layer", "activation", torch.ones(2))
    (log,) = (tmp_path / "nvdlfw_inspect_logs").iterdir()
    said = "WARNING - [step] statistics were taken but never written: expected a call of"
    assert (said in log.read_text()) == (steps == 0)


@pytest.mark.parametrize(
    ("schedule", "iterations"),
    [
        ({"freq": 3}, [0, 3, 6]),
        ({"start_step": 2, "end_step": 5}, [2, 3, 4, 5]),
        ({"freq": 2, "start_end_list": [[0, 1], [3, 6]]}, [0, 4, 6]),
        ({"start_step": 5, "end_step": -1}, [5, 6]),
    ],
)
def test_schedules(tmp_path: Path, schedule: dict, iterations: list[int]) -> None:
    with debugging(tmp_path, everything(**schedule)):
        for _ in range(7):
            inspect("layer", "activation", torch.ones(2))
            debug_api.step()
    assert [iteration for iteration, _, _ in logged(tmp_path)] == iterations


def test_each_tensor_of_a_struct_has_its_own_schedule(tmp_path: Path) -> None:
    struct = [
        {"tensor": "activation", "stats": ["mean"], "freq": 2},
        {"tensor": "gradient", "stats": ["max"], "freq": 3},
    ]
    with debugging(tmp_path, section("LogTensorStats", tensors_struct=struct)):
        for _ in range(4):
            for tensor in ("activation", "gradient"):
                inspect("layer", tensor, torch.ones(2))
            debug_api.step()
    assert {(i, tensor): list(v) for (i, _, tensor), v in logged(tmp_path).items()} == {
        (0, "activation"): ["mean"],
        (0, "gradient"): ["max"],
        (2, "activation"): ["mean"],
        (3, "gradient"): ["max"],
    }


def test_non_finite_and_empty_tensors(tmp_path: Path, device: str) -> None:
    tensors = {
        "nan": torch.tensor([1.0, math.nan]),
        "infinite": torch.tensor([1.0, -math.inf]),
        "zero": torch.zeros(4),
        "empty": torch.empty(0, 4),
        "one": torch.tensor([3.0]),
    }
    with debugging(tmp_path, everything()):
        for layer, x in tensors.items():
            inspect(layer, "activation", x.to(device))
        debug_api.step()
    found = {layer: values for (_, layer, _), values in logged(tmp_path).items()}
    for layer in ("nan", "zero", "one"):
        assert_statistics(found[layer], reference(tensors[layer]))
    assert found["infinite"]["min"] == -math.inf
    assert found["infinite"]["cur_amax"] == math.inf
    assert found["infinite"]["dynamic_range"] == math.inf
    assert set(found["empty"].values()) == {None}


def _log2_range(block: torch.Tensor) -> float:
    nonzero = block[block != 0].abs().double()
    return (nonzero.max().log2() - nonzero.min().log2()).item() if len(nonzero) else 0.0


@pytest.mark.parametrize("dims", [1, 2])
def test_blockwise_dynamic_range(tmp_path: Path, device: str, dims: int) -> None:
    x = torch.randn(16, 32)
    x[:4, :4] = 0
    x[8, 9] = 1000
    stat = {"max_blockwise_dynamic_range": {"block_size": 4, "dims": dims}}
    with debugging(tmp_path, everything(tensors=["activation", "gradient"], stats=[stat])):
        for tensor in ("activation", "gradient"):
            for part in x.split(8):
                inspect("layer", tensor, part.to(device))
        debug_api.step()
    rows = x.reshape(-1, 4) if dims == 1 else x.unfold(0, 4, 4).unfold(1, 4, 4).reshape(-1, 16)
    along = max(_log2_range(block) for block in rows)
    across = along
    if dims == 1:
        columns = [part.t().reshape(-1, 4) for part in x.split(8)]
        across = max(_log2_range(block) for part in columns for block in part)
    name = f"max_blockwise_dynamic_range_block_size_4_dims_{dims}"
    found = logged(tmp_path)
    assert found[0, "layer", "gradient"][name] == pytest.approx(along)
    both = found[0, "layer", "activation"][f"{name}_max_over_orientations"]
    assert both == pytest.approx(max(along, across))


@pytest.mark.parametrize("dims", [1, 2])
def test_the_last_blocks_may_be_smaller(tmp_path: Path, device: str, dims: int) -> None:
    stat = {"max_blockwise_dynamic_range": {"block_size": 16, "dims": dims}}
    x = torch.randn(21, 40, device=device)
    with debugging(tmp_path, section("LogTensorStats", tensors=["gradient"], stats=[stat])):
        inspect("layer", "gradient", x)
        debug_api.step()
    if dims == 1:
        parts = x.flatten().split(16)
    else:
        parts = [part for rows in x.split(16) for part in rows.split(16, 1)]
    found = logged(tmp_path)[0, "layer", "gradient"]
    (value,) = found.values()
    assert value == pytest.approx(max(_log2_range(part.flatten()) for part in parts))


def test_quantised_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with (
        debugging(tmp_path, everything()),
        pytest.raises(TypeError, match=r"high precision.*uint8.*layer fc1, tensor weight"),
    ):
        inspect("fc1", "weight", torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [32, 21])
def test_the_six_tensors_of_a_linear(tmp_path: Path, device: str, recipe: str, rows: int) -> None:
    layer = te.Linear(32, 48, device=device, params_dtype=torch.bfloat16, name="layer")
    pieces: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    with debugging(tmp_path, everything()):
        for _ in range(2):
            x = torch.randn(rows, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
            with scope(recipe):
                y = layer(x)
            upstream = torch.randn_like(y)
            layer.weight.grad = None
            y.backward(upstream)
            seen = (x, upstream, layer.weight, y, layer.weight.grad, x.grad)
            for kind, tensor in zip(KINDS, seen, strict=True):
                pieces[kind].append(tensor)
        debug_api.step()
    pieces["weight"] = pieces["weight"][:1]
    found = logged(tmp_path)
    assert {tensor for _, _, tensor in found} == set(KINDS)
    for kind, parts in pieces.items():
        assert_statistics(found[0, "layer", kind], reference(*parts))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_norm_in_front_gives_its_output(tmp_path: Path, device: str, recipe: str) -> None:
    layer = te.LayerNormLinear(
        64, 32, device=device, params_dtype=torch.bfloat16, name="qkv", return_layernorm_output=True
    )
    with debugging(tmp_path, everything(tensors=["activation"])):
        x = torch.randn(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        with scope(recipe):
            y, normed = layer(x)
        y.sum().backward()
        debug_api.step()
    assert_statistics(logged(tmp_path)[0, "qkv", "activation"], reference(normed))


@pytest.mark.parametrize(
    ("stats", "got"),
    [
        ({"max": 1}, "stats: expected max without keys, got {'max': 1}"),
        ([{"max_blockwise_dynamic_range": {"dims": 3}}], "dims: expected an int of at least 1 and"),
        ([{"max_blockwise_dynamic_range": {"block": 16}}], "expected one of block_size, dims, got"),
    ],
)
def test_keys_of_statistics_are_checked_at_load(tmp_path: Path, stats: Any, got: str) -> None:
    config = section("LogTensorStats", tensors=["weight"], stats=stats)
    with pytest.raises(ValueError, match=re.escape(got)):
        debug_api.initialize({"s": config}, log_dir=tmp_path)


@pytest.mark.parametrize("feature", [LogTensorStats, LogFp8TensorStats])
def test_unknown_statistics_are_told_with_their_layer(feature: type) -> None:
    with pytest.raises(ValueError, match=r"got 'median' \(layer l, tensor weight\)"):
        feature().requested_statistics({"stats": ["median"]}, "l", "weight", None)


@pytest.mark.parametrize("observed", [False, True])
def test_layers_are_not_recorded_again_in_each_inspected_step(
    observed: bool, tmp_path: Path, monkeypatch
) -> None:
    made = recordings_made(monkeypatch)
    layer = te.TransformerLayer(32, 64, 2, device="cpu", params_dtype=torch.bfloat16, name="layer")
    if observed:  # it runs part by part
        layer.self_attention.register_forward_hook(lambda *_: None)
    config = section("LogTensorStats", tensors=["activation", "gradient"], stats=["max"], freq=3)
    counts, x = [], torch.randn(16, 1, 32, dtype=torch.bfloat16)
    with debugging(tmp_path, config):
        for step in range(9):
            before = len(made)
            with scope("delayed"):
                layer(x * step).sum().backward()
            debug_api.step()
            counts.append(len(made) - before)
    assert counts[0] > 0 and counts[2:] == [0] * 7
    largest = {
        iteration: found["max"]
        for (iteration, name, tensor), found in logged(tmp_path).items()
        if name.endswith("fc2") and tensor == "activation"
    }
    assert [*largest] == [0, 3, 6]
    assert largest[0] != largest[3]


def test_plans_of_a_session_are_dropped_in_the_next_one(tmp_path: Path) -> None:
    layer, x = te.Linear(32, 32, device="cpu", name="fc"), torch.ones(16, 32)
    for session in range(3):
        folder = tmp_path / str(session)
        with debugging(
            folder, section("LogTensorStats", tensors=["weight"], stats=["max"], freq=2)
        ):
            for _ in range(4):
                layer(x)
                debug_api.step()
        assert len(logged(folder)) == 2
        assert [len(plan.inspection.watching) for plan in layer._plans.values()] == [1]
