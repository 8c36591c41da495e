"""State dicts of FP8 weights, and `_extra_state` of every origin."""

import io
import os
import pickle
import struct
import warnings
from pathlib import Path

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.extra_state import MAGIC
from transformer_engine.pytorch.scaling_state import FORWARD
from transformer_engine.pytorch.tensor import Float8Tensor

RECIPES = {"delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}


def fp8(make=lambda **kw: te.Linear(32, 48, **kw), **more) -> nn.Module:
    with te.fp8_model_init():
        return make(**more)


def with_codes(weight: Float8Tensor, codes: torch.Tensor, scale: float) -> None:
    scales = torch.tensor([1 / scale, scale], device=weight.device)
    scales[0] = 1 / scales[1]
    weight.data = weight.detach().with_codes(codes.to(weight.device), scales)


def train(module: nn.Module, recipe: str, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(16, 2, 32, device=next(module.parameters()).device)
    for _ in range(steps):
        with te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
            module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_is_restored(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    one, two = (
        fp8(lambda **kw: te.Linear(16, 16, params_dtype=dtype, **kw), device=device) for _ in "ab"
    )
    scales = [1.0, 2.0**-20, 2.0**90, *torch.logspace(-6, 6, 60).tolist()]
    for scale in scales:
        with_codes(one.weight, codes, scale)
        state = one.state_dict()
        assert type(state["weight"]) is torch.Tensor and state["weight"].dtype is dtype
        assert_bitwise(state["weight"], one.weight.dequantize())
        two.load_state_dict(state)
        restored = two.weight._data.cpu()
        assert restored[15, 15] == 0x7F  # the other NaN: casts give one of them
        restored[15, 15] = 0xFF
        assert_bitwise(restored, codes)
        assert_bitwise(two.weight._scale_inv, one.weight._scale_inv)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_restores_weights_and_scaling(recipe: str, assign: bool, device: str) -> None:
    one, two = (fp8(lambda **kw: te.TransformerLayer(32, 64, 2, **kw), device=device) for _ in "ab")
    train(one, recipe)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    pairs = list(zip(one.named_parameters(), two.parameters(), strict=True))
    for (name, ours), theirs in pairs:
        assert type(ours) is type(theirs) and theirs.requires_grad, name
        if isinstance(ours, Float8Tensor):
            assert_bitwise(theirs._data, ours._data)
            assert_bitwise(theirs._scale_inv, ours._scale_inv)
        else:
            assert_bitwise(theirs, ours)
    again = two.state_dict()
    for key, value in one.state_dict().items():
        assert_bitwise(again[key], value)
    for module in (one, two):
        torch.manual_seed(5)
        train(module, recipe, 2)
    for (name, ours), theirs in zip(
        one.state_dict().items(), two.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_from_high_precision_and_back(device: str) -> None:
    plain = te.LayerNormMLP(32, 64, device=device)
    kept = fp8(lambda **kw: te.LayerNormMLP(32, 64, **kw), device=device)
    kept.load_state_dict(plain.state_dict())
    expected = kept.fc1_weight._quantizer(plain.fc1_weight.detach())
    assert_bitwise(kept.fc1_weight._data, expected._data)
    back = te.LayerNormMLP(32, 64, device=device)
    train(kept, "delayed")
    back.load_state_dict(kept.state_dict())
    assert type(back.fc1_weight) is nn.Parameter
    assert_bitwise(back.fc1_weight, kept.fc1_weight.dequantize())
    # Its FP8 casts begin with the scales that the weights had.
    forward = back.scaling[FORWARD].scale
    assert forward[1].item() == kept.fc1_weight._scale_inv[1].item()
    assert forward[4].item() == kept.fc2_weight._scale_inv[1].item()


def test_plain_torch_layers_load(device: str) -> None:
    torch_linear = nn.Linear(32, 48, device=device)
    kept = fp8(device=device)
    kept.load_state_dict(torch_linear.state_dict())
    torch.testing.assert_close(kept.weight.dequantize(), torch_linear.weight, rtol=0.07, atol=1e-4)
    torch_linear.load_state_dict(
        {k: v for k, v in kept.state_dict().items() if k != "_extra_state"}
    )
    assert_bitwise(torch_linear.weight, kept.weight.dequantize())


def test_weights_load_into_meta_modules(device: str) -> None:
    source = fp8(device=device)
    target = fp8(device="meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert isinstance(target.weight, Float8Tensor) and target.weight.device.type == device
    assert_bitwise(target.weight._data, source.weight._data)
    with torch.no_grad():
        target.weight.mul_(2)


def test_modules_on_meta_have_a_state_dict() -> None:
    state = fp8(device="meta").state_dict()
    assert type(state["weight"]) is torch.Tensor and state["weight"].is_meta
    assert state["weight"].dtype is torch.float32 and state["_extra_state"].numel() == 0


@pytest.mark.parametrize("format", [te.DType.kFloat8E4M3, te.DType.kFloat8E5M2])
def test_parameters_that_users_made(format: te.DType, device: str) -> None:
    values = torch.randn(48, 32, device=device)
    codes = te.Float8CurrentScalingQuantizer(format)(values)
    layer, twin = te.Linear(32, 48, device=device), fp8(device=device)
    for scale_inv in (codes._scale_inv, codes._scale_inv[:1]):
        own = Float8Tensor(codes.shape, codes.dtype, codes._data.clone(), scale_inv.clone(), format)
        layer.weight = nn.Parameter(own)
        train(layer, "current", steps=0)
        state = layer.state_dict()
        twin.load_state_dict(state)
        torch.testing.assert_close(twin.weight.dequantize(), own.dequantize(), rtol=0.07, atol=1e-3)
        layer.weight = nn.Parameter(own.with_codes(codes._data.clone(), scale_inv.clone()))
        layer.weight._quantizer = te.Float8CurrentScalingQuantizer(format)
        train(layer, "current", steps=1)
        layer.load_state_dict(state)
        torch.testing.assert_close(
            layer.weight.dequantize(), own.dequantize(), rtol=0.13, atol=1e-3
        )


def test_a_scale_that_cannot_hold_the_values_is_replaced(device: str) -> None:
    source, target = fp8(device=device), fp8(device=device)
    state = source.state_dict()
    state["weight"] = 100 * state["weight"]  # edited, say by merging an adapter
    target.load_state_dict(state)
    torch.testing.assert_close(target.weight.dequantize(), state["weight"], rtol=0.07, atol=1e-3)


@pytest.mark.parametrize(
    "scales", [(0.0, 0.0), (-1.0, -1.0), (torch.nan, torch.nan), (0.0, torch.inf), (7.0, 1.0)]
)
def test_a_scale_that_is_none_is_replaced(scales: tuple[float, float]) -> None:
    layer = fp8(device="cpu")
    state, codes = layer.state_dict(), layer.weight._data.clone()
    state["_extra_state"][-8:] = torch.tensor(scales).view(torch.uint8)
    layer.load_state_dict(state)
    assert_bitwise(layer.weight._data, codes)
    torch.testing.assert_close(layer.weight.dequantize(), state["weight"])


def test_state_dict_does_not_alias_and_keep_vars_gives_parameters() -> None:
    layer = fp8(device="cpu")
    state = layer.state_dict()
    before = state["weight"].clone()
    with torch.no_grad():
        layer.weight.zero_()
    assert_bitwise(state["weight"], before)
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight


def test_mismatched_shapes_are_named() -> None:
    layer, state = fp8(device="cpu"), fp8(lambda **kw: te.Linear(16, 48, **kw), device="cpu")
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict(state.state_dict())


def test_safetensors_round_trip(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    one, two = (fp8(lambda **kw: te.TransformerLayer(32, 64, 2, **kw), device="cpu") for _ in "ab")
    train(one, "delayed")
    safetensors.save_file(one.state_dict(), tmp_path / "model.safetensors")
    two.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    for value, again in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert_bitwise(again, value)
    safetensors.save_model(one, str(tmp_path / "whole.safetensors"))
    safetensors.load_model(two, str(tmp_path / "whole.safetensors"))


class Hostile:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> object:
        return os.mkdir, ("unpickled",)


def pickled_states() -> dict[str, object]:
    archive = io.BytesIO()
    torch.save({"scale_fwd": Hostile()}, archive)
    raw = pickle.dumps({"recipe": Hostile()})
    return {
        "uint8 tensor": torch.frombuffer(bytearray(raw), dtype=torch.uint8),
        "archive": torch.frombuffer(bytearray(archive.getvalue()), dtype=torch.uint8),
        "BytesIO": io.BytesIO(archive.getvalue()),
        "bytes": raw,
    }


@pytest.mark.parametrize("kind", ["uint8 tensor", "archive", "BytesIO", "bytes"])
@pytest.mark.parametrize("enabled", [True, False])
def test_pickled_state_is_never_unpickled_and_reported_once(
    kind: str, enabled: bool, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with te.fp8_model_init(enabled=enabled):
        layer = te.TransformerLayer(32, 64, 2, device="cpu")
    foreign = pickled_states()[kind]
    state = {k: foreign if k.endswith("_extra_state") else v for k, v in layer.state_dict().items()}
    assert sum(k.endswith("_extra_state") for k in state) > 2
    file = tmp_path / "old.pt"
    torch.save(state, file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer.load_state_dict(torch.load(file, weights_only=True))
        layer.load_state_dict(state)
    messages = [str(w.message) for w in caught if "_extra_state" in str(w.message)]
    assert len(messages) == 1 and "pickled, never unpickled" in messages[0]
    assert not Path("unpickled").exists()
    train(layer, "delayed")


def test_missing_and_empty_state_is_silent() -> None:
    layer = fp8(lambda **kw: te.TransformerLayer(32, 64, 2, **kw), device="cpu")
    state = layer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict({k: v for k, v in state.items() if "_extra" not in k})
        for nothing in (None, torch.empty(0, dtype=torch.uint8), io.BytesIO()):
            layer.load_state_dict({k: nothing if "_extra" in k else v for k, v in state.items()})


@pytest.mark.parametrize(
    "raw",
    [
        MAGIC,
        MAGIC + struct.pack("<ii", 3, 2),
        MAGIC + struct.pack("<iii", -3, 2, 4),
        MAGIC + struct.pack("<iii", 2**31 - 1, 2**31 - 1, 2**31 - 1),
        MAGIC + struct.pack("<iii", 3, 2, 4) + bytes(50),
        MAGIC + struct.pack("<iii", 0, 0, 0) + bytes(7),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_truncated_and_hostile_state_is_refused(raw: bytes, enabled: bool) -> None:
    with te.fp8_model_init(enabled=enabled):
        layer = te.Linear(32, 48, device="cpu", name="proj")
    state = layer.state_dict()
    state["_extra_state"] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    with pytest.raises((ValueError, RuntimeError), match=r"bytes of FP8 state.*layer proj"):
        layer.load_state_dict(state)
