"""DumpTensors: files can be read by `torch.load(weights_only=True)`."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from debug_session import debugging, inspect, section
from inspect_logs import messages

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.pytorch.dtypes import E4M3
from transformer_engine.pytorch.kernels.dequantize import dequantize
from transformer_engine.pytorch.tensor import Float8BlockQuantizer, Float8CurrentScalingQuantizer


def dump(**more) -> dict:
    return section("DumpTensors", **{"tensors": ["activation"], **more})


def files(folder: Path) -> dict[str, dict]:
    root = folder / "tensor_dumps" / "rank_0"
    return {
        str(path.relative_to(root)): torch.load(path, weights_only=True)
        for path in sorted(root.rglob("*.pt"))
    }


def test_both_kinds(tmp_path: Path, device: str) -> None:
    x = torch.randn(16, 32, device=device)
    q = Float8CurrentScalingQuantizer(E4M3)(x)
    with debugging(tmp_path, dump(high_precision_tensor=True, quantized_tensor=True)):
        sides = {"rowwise_quantized_tensor": q, "columnwise_quantized_tensor": q}
        inspect("a/b.fc1 x", "activation", x, **sides)
        debug_api.step()
    ((name, found),) = files(tmp_path).items()
    assert name == "iter_000000/a_b_fc1_x_activation.pt"
    assert (found["layer"], found["tensor"], found["iteration"]) == ("a/b.fc1 x", "activation", 0)
    assert found["high_precision"].equal(x.cpu())
    for side, exact in (("rowwise", q.dequantize()), ("columnwise", q.dequantize().t())):
        codes = found["quantized"][side]
        assert codes["format"] == "E4M3"
        back = dequantize(codes["codes"].contiguous(), E4M3, codes["scale_inv"], torch.float32)
        assert back.equal(exact.cpu())


def test_files_of_an_earlier_run(tmp_path: Path) -> None:
    lines = []
    for value in (1.0, 2.0):
        with debugging(tmp_path, dump(high_precision_tensor=True), log_timestamps=False):
            for _ in range(2):
                inspect("fc1", "activation", torch.full((2, 2), value))
                debug_api.step()
        lines.append(messages(tmp_path))
    folder = tmp_path / "tensor_dumps" / "rank_0"
    replaced = folder / "iter_000000" / "fc1_activation.pt"
    said = f"INFO - fc1: [TE DumpTensors] Overwriting existing dump file: {replaced}"
    assert [sum("Overwriting" in line for line in run) for run in lines] == [0, 1]
    assert said in lines[1]
    for run in lines:
        assert run.count(f"INFO - TensorLogger initialized. Saving tensors to: {folder}") == 1
    assert [float(found["high_precision"][0, 0]) for found in files(tmp_path).values()] == [2, 2]


@pytest.mark.parametrize("dimensions", [1, 2])
def test_codes_of_blocks(tmp_path: Path, dimensions: int) -> None:
    x = torch.randn(16, 160)
    sides = {"rowwise": True, "columnwise": True}
    q = Float8BlockQuantizer(E4M3, block_scaling_dim=dimensions, **sides)(x)
    with debugging(tmp_path, dump(quantized_tensor=True)):
        sides = {"rowwise_quantized_tensor": q, "columnwise_quantized_tensor": q}
        inspect("fc1", "activation", x, **sides)
        debug_api.step()
    ((_, found),) = files(tmp_path).items()
    for side, (codes, scales) in {"rowwise": q.parts[:2], "columnwise": q.parts[2:]}.items():
        dumped = found["quantized"][side]
        assert dumped["block_dimensions"] == dimensions
        assert dumped["codes"].equal(codes) and dumped["scale_inv"].equal(scales)


def test_micro_batches_and_steps_have_files_of_their_own(tmp_path: Path) -> None:
    with debugging(tmp_path, dump(high_precision_tensor=True, freq=2)):
        for iteration in range(3):
            for microbatch in range(2):
                inspect("fc1", "activation", torch.tensor([10.0 * iteration + microbatch]))
            debug_api.step()
    assert {name: found["high_precision"].item() for name, found in files(tmp_path).items()} == {
        "iter_000000/fc1_activation.pt": 0.0,
        "iter_000000/fc1_activation_microbatch1.pt": 1.0,
        "iter_000002/fc1_activation.pt": 20.0,
        "iter_000002/fc1_activation_microbatch1.pt": 21.0,
    }


@pytest.mark.parametrize(
    ("runs", "dumped"), [("te", "t"), ("eet", "t"), ("etett", "ttt"), ("ee", "ee")]
)
def test_an_evaluation_counts_only_without_training(
    tmp_path: Path, device: str, runs: str, dumped: str
) -> None:
    layer = te.Linear(32, 32, device=device, name="layer")
    tensors = {"tensors": ["activation", "gradient"], "high_precision_tensor": True}
    inputs = {"t": [], "e": []}
    with debugging(tmp_path, dump(**tensors)):
        for run in runs:
            layer.train(run == "t")
            x = torch.randn(16, 32, device=device)
            inputs[run].append(x.cpu())
            with torch.set_grad_enabled(run == "t"):
                y = layer(x)
            if run == "t":
                y.sum().backward()
        debug_api.step()
    found = files(tmp_path)
    activations = [file["high_precision"] for name, file in found.items() if "_act" in name]
    assert len(activations) == len(dumped) and len(found) == len(dumped) + dumped.count("t")
    for got, exact in zip(activations, inputs[dumped[0]], strict=True):
        assert got.equal(exact)


def test_layers_whose_names_are_alike_in_files_have_files_of_their_own(tmp_path: Path) -> None:
    with debugging(tmp_path, dump(high_precision_tensor=True)):
        for _ in range(2):
            for value, layer in enumerate(("a.b", "a_b", "a b")):
                inspect(layer, "activation", torch.tensor([float(value)]))
            debug_api.step()
    found = files(tmp_path)
    assert {
        name: (file["layer"], file["high_precision"].item()) for name, file in found.items()
    } == {
        f"iter_00000{step}/a_b_activation{number}.pt": (layer, value)
        for step in range(2)
        for number, layer, value in (("", "a.b", 0.0), ("_2", "a_b", 1.0), ("_3", "a b", 2.0))
    }


def test_without_log_files_dumps_still_go_to_log_dir(tmp_path: Path) -> None:
    with debugging(tmp_path, dump(high_precision_tensor=True), tb_writer=Mock()):
        inspect("fc1", "activation", torch.ones(2, 2))
    assert list(files(tmp_path)) == ["iter_000000/fc1_activation.pt"]


def test_nothing_to_dump(tmp_path: Path) -> None:
    with debugging(tmp_path, dump(quantized_tensor=True)):
        inspect("fc1", "activation", torch.ones(2))
        debug_api.step()
    assert files(tmp_path) == {}


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(content: dict, path: Path) -> None:
        Path(path).write_bytes(b"half of it")
        raise RuntimeError("the disk is full")

    with debugging(tmp_path, dump(high_precision_tensor=True)):
        inspect("fc1", "activation", torch.ones(2))
        monkeypatch.setattr(torch, "save", fill_the_disk)
        with pytest.warns(UserWarning, match="could not write .*: the disk is full"):
            inspect("fc1", "activation", torch.ones(2))
    left = [path.name for path in (tmp_path / "tensor_dumps").rglob("*") if path.is_file()]
    assert left == ["fc1_activation.pt"]


def test_neither_kind_is_a_warning(tmp_path: Path) -> None:
    with (
        debugging(tmp_path, dump()),
        pytest.warns(UserWarning, match="expected high_precision_tensor or quantized_tensor"),
    ):
        inspect("fc1", "activation", torch.ones(2))
    assert files(tmp_path) == {}


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    with debugging(tmp_path, dump(high_precision_tensor=True)):
        (tmp_path / "tensor_dumps").write_text("in the way")
        with pytest.warns(UserWarning, match="could not write") as w:
            for _ in range(2):
                inspect("fc1", "activation", torch.ones(2))
                debug_api.step()
    assert len(w) == 1
