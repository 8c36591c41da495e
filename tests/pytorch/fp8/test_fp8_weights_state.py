"""State dicts of FP8 weights, and `_extra_state` that is missing, pickled, edited or damaged."""

import copy
import io
import os
import pickle
import struct
import warnings
from pathlib import Path

import pytest
import torch
from fp8_kinds import KINDS, NAMES, codes, scales
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.fp8.extra_state import MAGIC
from transformer_engine.pytorch.fp8.scaling_state import FORWARD
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "blocks of any scale": Float8BlockScaling(use_f32_scales=True),
}
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def fp8(make=lambda **kw: te.Linear(32, 48, **kw), recipe=None, **more) -> nn.Module:
    with te.fp8_model_init(recipe=recipe):
        return make(**more)


def with_codes(weight: QuantizedTensor, own: torch.Tensor, scale: float) -> None:
    pair = torch.tensor([1 / scale, scale], device=weight.device)
    pair[0] = 1 / pair[1]
    if isinstance(weight, Float8BlockwiseQTensor):
        known = [
            own.to(weight.device),
            pair[0].expand(1, 4) * torch.tensor([[1.0, 0, 0, 0]]).to(pair),
        ]
    else:
        known = [own.to(weight.device), pair]
    others = [None] * (len(weight.parts) - 2)
    weight.data = weight.detach().with_parts([*known, *others])


def train(module: nn.Module, recipe: str, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first = next(p for p in module.parameters() if p.ndim == 2)
    x = torch.randn(16, 2, first.shape[1], device=first.device)
    for _ in range(steps):
        with te.fp8_autocast(fp8_recipe=RECIPES[recipe]):
            module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_is_restored(
    dtype: torch.dtype, kind: type[QuantizedTensor], device: str
) -> None:
    own = torch.arange(256, dtype=torch.uint8).view(16, 16)
    one, two = (
        fp8(
            lambda **kw: te.Linear(16, 16, params_dtype=dtype, **kw),
            recipe=KINDS[kind],
            device=device,
        )
        for _ in "ab"
    )
    for scale in [1.0, 2.0**-20, 2.0**90, *torch.logspace(-6, 6, 60).tolist()]:
        with_codes(one.weight, own, scale)
        state = one.state_dict()
        assert type(state["weight"]) is torch.Tensor and state["weight"].dtype is dtype
        assert_bitwise(state["weight"], one.weight.dequantize())
        two.load_state_dict(state)
        restored = codes(two.weight).cpu()
        assert restored[15, 15] == 0x7F  # a cast gives one of the two codes of NaN
        restored[15, 15] = 0xFF
        assert_bitwise(restored, own)
        assert_bitwise(scales(two.weight), scales(one.weight))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_restores_weights_and_scaling(recipe: str, assign: bool, device: str) -> None:
    size, kind = (160, RECIPES[recipe]) if "blocks" in recipe else (32, None)
    one, two = (
        fp8(lambda **kw: te.TransformerLayer(size, 2 * size, 2, **kw), recipe=kind, device=device)
        for _ in "ab"
    )
    train(one, recipe)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    pairs = list(zip(one.named_parameters(), two.parameters(), strict=True))
    for (name, ours), theirs in pairs:
        assert type(ours) is type(theirs) and theirs.requires_grad, name
        if isinstance(ours, QuantizedTensor):
            assert_bitwise(codes(theirs), codes(ours))
            assert_bitwise(scales(theirs), scales(ours))
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


def test_scales_of_blocks_would_not_come_back_by_themselves(device: str) -> None:
    """225 is rounded to 224. A cast of 224 alone would choose twice the scale."""
    layers = [fp8(recipe=RECIPES["blocks"], device=device) for _ in "abc"]
    with torch.no_grad():
        layers[0].weight.copy_(torch.full((48, 32), 225.0))
    state = layers[0].state_dict()
    layers[1].load_state_dict(state)
    assert_bitwise(codes(layers[1].weight), codes(layers[0].weight))
    del state["_extra_state"]
    layers[2].load_state_dict(state)
    assert scales(layers[2].weight)[0, 0] == scales(layers[0].weight)[0, 0] / 2
    assert_bitwise(layers[2].weight.dequantize(), layers[0].weight.dequantize())


def test_from_high_precision_and_back(device: str) -> None:
    plain = te.LayerNormMLP(32, 64, device=device)
    fp8_module = fp8(lambda **kw: te.LayerNormMLP(32, 64, **kw), device=device)
    fp8_module.load_state_dict(plain.state_dict())
    expected = fp8_module.fc1_weight._quantizer(plain.fc1_weight.detach())
    assert_bitwise(fp8_module.fc1_weight._data, expected._data)
    back = te.LayerNormMLP(32, 64, device=device)
    train(fp8_module, "delayed")
    back.load_state_dict(fp8_module.state_dict())
    assert type(back.fc1_weight) is nn.Parameter
    assert_bitwise(back.fc1_weight, fp8_module.fc1_weight.dequantize())
    in_blocks = fp8(
        lambda **kw: te.LayerNormMLP(32, 64, **kw), recipe=RECIPES["blocks"], device=device
    )
    in_blocks.load_state_dict(fp8_module.state_dict())  # blocks from weights with one scale
    torch.testing.assert_close(
        in_blocks.fc1_weight.dequantize(), fp8_module.fc1_weight.dequantize(), rtol=0.07, atol=1e-4
    )
    # The FP8 casts of `back` begin with the scales of the FP8 weights.
    forward = back.scaling[FORWARD].scale
    assert forward[1].item() == fp8_module.fc1_weight._scale_inv[1].item()
    assert forward[4].item() == fp8_module.fc2_weight._scale_inv[1].item()


@kinds
def test_state_dicts_are_not_part_of_a_graph(kind: type[QuantizedTensor], device: str) -> None:
    state = fp8(recipe=KINDS[kind], device=device).state_dict()
    assert not any(value.requires_grad for value in copy.deepcopy(state).values())


@kinds
def test_plain_torch_layers_load(kind: type[QuantizedTensor], device: str) -> None:
    torch_linear = nn.Linear(32, 48, device=device)
    fp8_module = fp8(recipe=KINDS[kind], device=device)
    fp8_module.load_state_dict(torch_linear.state_dict())
    torch.testing.assert_close(
        fp8_module.weight.dequantize(), torch_linear.weight, rtol=0.07, atol=1e-4
    )
    torch_linear.load_state_dict(
        {k: v for k, v in fp8_module.state_dict().items() if k != "_extra_state"}
    )
    assert_bitwise(torch_linear.weight, fp8_module.weight.dequantize())


@kinds
def test_weights_load_into_meta_modules(kind: type[QuantizedTensor], device: str) -> None:
    source = fp8(recipe=KINDS[kind], device=device)
    target = fp8(recipe=KINDS[kind], device="meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert isinstance(target.weight, kind) and target.weight.device.type == device
    assert_bitwise(codes(target.weight), codes(source.weight))
    with torch.no_grad():
        target.weight.mul_(2)


@kinds
@pytest.mark.parametrize("values", [torch.bfloat16, torch.float16, torch.float64])
def test_assigned_weights_have_the_dtype_of_the_values(
    values: torch.dtype, kind: type[QuantizedTensor], device: str
) -> None:
    source = te.Linear(32, 48, device=device).to(values)
    state = source.state_dict()
    for on in ("meta", device):
        layer = fp8(recipe=KINDS[kind], device=on)
        layer.load_state_dict(state, assign=True)
        # Parameters cannot be float64.
        expected = torch.float32 if values is torch.float64 else values
        assert isinstance(layer.weight, kind) and layer.weight.dtype is expected
    copied = fp8(recipe=KINDS[kind], device=device)
    copied.load_state_dict(source.state_dict())
    assert copied.weight.dtype is torch.float32
    assert_bitwise(codes(copied.weight), codes(layer.weight))


@kinds
def test_modules_on_meta_have_a_state_dict(kind: type[QuantizedTensor]) -> None:
    state = fp8(recipe=KINDS[kind], device="meta").state_dict()
    assert type(state["weight"]) is torch.Tensor and state["weight"].is_meta
    assert state["weight"].dtype is torch.float32 and state["_extra_state"].numel() == 0


@pytest.mark.parametrize("format", [te.DType.kFloat8E4M3, te.DType.kFloat8E5M2])
def test_parameters_that_users_made(format: te.DType, device: str) -> None:
    values = torch.randn(48, 32, device=device)
    made = te.Float8CurrentScalingQuantizer(format)(values)
    layer, twin = te.Linear(32, 48, device=device), fp8(device=device)
    for scale_inv in (made._scale_inv, made._scale_inv[:1]):
        own = Float8Tensor(made.shape, made.dtype, made._data.clone(), scale_inv.clone(), format)
        layer.weight = nn.Parameter(own)
        train(layer, "current", steps=0)
        state = layer.state_dict()
        twin.load_state_dict(state)
        torch.testing.assert_close(twin.weight.dequantize(), own.dequantize(), rtol=0.07, atol=1e-3)
        layer.weight = nn.Parameter(own.with_parts([made._data.clone(), scale_inv.clone()]))
        layer.weight._quantizer = te.Float8CurrentScalingQuantizer(format)
        train(layer, "current", steps=1)
        layer.load_state_dict(state)
        torch.testing.assert_close(
            layer.weight.dequantize(), own.dequantize(), rtol=0.13, atol=1e-3
        )


@kinds
@pytest.mark.parametrize("factor", [100.0, 0.3, 1e-4])
def test_values_that_were_edited_have_scales_of_their_own(
    factor: float, kind: type[QuantizedTensor], device: str
) -> None:
    """For instance by merging an adapter into the weight."""
    source, target, other = (fp8(recipe=KINDS[kind], device=device) for _ in "abc")
    state = source.state_dict()
    state["weight"] = factor * state["weight"]
    target.load_state_dict(state)
    found = target.weight.dequantize()
    torch.testing.assert_close(found, state["weight"], rtol=0.07, atol=1e-3 * factor)
    del state["_extra_state"]
    other.load_state_dict(state)
    assert_bitwise(found, other.weight.dequantize())


@pytest.mark.parametrize(
    "pair", [(0.0, 0.0), (-1.0, -1.0), (torch.nan, torch.nan), (0.0, torch.inf), (7.0, 1.0)]
)
def test_a_scale_that_is_none_is_replaced(pair: tuple[float, float]) -> None:
    layer = fp8(device="cpu")
    state, before = layer.state_dict(), layer.weight._data.clone()
    state["_extra_state"][-8:] = torch.tensor(pair).view(torch.uint8)
    layer.load_state_dict(state)
    assert_bitwise(layer.weight._data, before)
    torch.testing.assert_close(layer.weight.dequantize(), state["weight"])


@pytest.mark.parametrize("inverse", [0.0, -1.0, torch.nan, torch.inf, 2.0**-140, 1e-6])
def test_blocks_whose_scale_is_none_get_another(inverse: float) -> None:
    """Only the block with the damaged scale gets another scale."""
    layer = fp8(lambda **kw: te.Linear(160, 48, **kw), recipe=RECIPES["blocks"], device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.full((48, 160), 225.0))
    state, before = layer.state_dict(), scales(layer.weight).clone()
    state["_extra_state"][-16:-12] = torch.tensor([inverse]).view(torch.uint8)  # of the first block
    layer.load_state_dict(state)
    assert_bitwise(layer.weight.dequantize(), state["weight"])
    expected = before.clone()
    expected[0, 0] /= 2  # twice the scale, because 225 was rounded to 224
    assert_bitwise(scales(layer.weight), expected)


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


@pytest.mark.parametrize("recipe", ["delayed", "blocks"])
def test_safetensors_round_trip(recipe: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    one, two = (
        fp8(
            lambda **kw: te.TransformerLayer(32, 64, 2, **kw),
            recipe=RECIPES[recipe],
            device="cpu",
        )
        for _ in "ab"
    )
    train(one, recipe)
    safetensors.save_file(one.state_dict(), tmp_path / "model.safetensors")
    two.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    for value, again in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert_bitwise(again, value)
    safetensors.save_model(one, str(tmp_path / "whole.safetensors"))
    safetensors.load_model(two, str(tmp_path / "whole.safetensors"))


class Hostile:
    """Makes the folder `unpickled` when it is unpickled."""

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
    ("raw", "words"),
    [
        (MAGIC, "how many FP8 scales it has, got 8 bytes"),
        (MAGIC + struct.pack("<ii", 3, 2), "how many FP8 scales it has, got 16 bytes"),
        (MAGIC + struct.pack("<iii", -3, 2, 4), "how many FP8 scales it has, got 20 bytes"),
        (MAGIC + struct.pack("<iii", *[2**31 - 1] * 3), r"_extra_state of \d{20} bytes.*got 20:"),
        (MAGIC + struct.pack("<iii", 3, 2, 4) + bytes(50), "_extra_state of 120 bytes.*got 70:"),
        (MAGIC + struct.pack("<iii", 0, 0, 0) + bytes(7), "_extra_state of 20 bytes.*got 27:"),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_truncated_and_hostile_state_is_refused(raw: bytes, words: str, enabled: bool) -> None:
    with te.fp8_model_init(enabled=enabled):
        layer = te.Linear(32, 48, device="cpu", name="proj")
    state = layer.state_dict()
    state["_extra_state"] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=f"{words}.*layer proj"):
        layer.load_state_dict(state)
