"""`_extra_state` is copied, is ignored if it holds no bytes, and is refused if it is incomplete."""

import copy
import struct

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.dtypes import DType
from transformer_engine.pytorch.fp8.extra_state import MAGIC
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer


def linear_with_state() -> te.Linear:
    layer = te.Linear(32, 32, device="cpu", name="fc")
    with te.fp8_autocast(enabled=True):
        layer(torch.randn(16, 32)).sum().backward()
    return layer


@pytest.mark.parametrize("make", [linear_with_state, lambda: te.Linear(32, 32, device="cpu")])
def test_state_dicts_can_be_copied(make) -> None:
    """Trainers copy the state dict of the best model. The copy loads like the original."""
    state = make().state_dict()
    twice = [state, state]
    first, second = copy.deepcopy(twice)
    assert first is second
    copied, original = first["_extra_state"], state["_extra_state"]
    assert type(copied) is type(original)
    assert copied.data_ptr() != original.data_ptr() or not original.numel()
    layer = te.Linear(32, 32, device="cpu")
    layer.load_state_dict(first)
    assert torch.equal(layer.get_extra_state(), original)


FOREIGN = {
    "text": lambda: "scales",
    "number": lambda: 3.0,
    "floats": lambda: torch.ones(48),
    "meta": lambda: torch.ones(8, dtype=torch.uint8, device="meta"),
    "sparse": lambda: torch.ones(48, dtype=torch.uint8).to_sparse(),
    "integers with a scale": lambda: torch.quantize_per_tensor(torch.ones(48), 0.1, 0, torch.qint8),
    "FP8": lambda: Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(torch.ones(16, 16)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_holds_no_bytes_is_ignored_with_a_warning(kind: str) -> None:
    state = FOREIGN[kind]()
    layer = linear_with_state()
    before = layer.get_extra_state()
    with pytest.warns(UserWarning, match="ignoring the _extra_state of another package"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": state})
    assert torch.equal(layer.get_extra_state(), before)


@pytest.mark.parametrize("counts", [(3, 2, 0), (0, 0, 4), (3, 0, 0), (3, 0, 2), (0, 2, 2)])
def test_a_state_with_a_part_missing_is_refused(counts: tuple[int, int, int]) -> None:
    layer = te.Linear(32, 32, device="cpu", name="fc")
    header = MAGIC + struct.pack("<iii", *counts)
    numbers = sum(counts[:2]) * (1 + counts[2])
    raw = header + struct.pack(f"<{numbers}f", *[1.0] * numbers)
    with pytest.raises(ValueError, match=r"amax history of one step or more, .*\(layer fc\)"):
        layer.set_extra_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_rest_of_a_model_is_loaded_before_a_damaged_state_is_refused(enabled: bool) -> None:
    """Errors of all layers are in one error, beside those of torch."""

    def made() -> torch.nn.Sequential:
        with te.fp8_model_init(enabled=enabled):
            names = ("a", "b", "c", "d")
            layers = [te.Linear(32, 32, device="cpu", name=name) for name in names]
        return torch.nn.Sequential(*layers)

    source, target = made(), made()
    with te.fp8_autocast(enabled=True):
        source(torch.randn(16, 32)).sum().backward()
    state = source.state_dict()
    for damaged in ("0._extra_state", "2._extra_state"):
        state[damaged] = state[damaged][:-1]
    words = (
        r"(?s)is cut off or damaged \(layer a\).*is cut off or damaged \(layer c\).*size mismatch"
    )
    with pytest.raises(RuntimeError, match=words):
        target.load_state_dict({**state, "3.bias": torch.ones(3)})
    for i in range(4):
        assert (target[i].weight - source[i].weight).abs().max() < 1e-2
    assert torch.equal(target[1].get_extra_state(), source[1].get_extra_state())
    assert not target[0].scaling and not target[2].scaling


def test_weights_that_are_not_dense_are_refused() -> None:
    with te.fp8_model_init():
        layer = te.Linear(32, 32, device="cpu")
    before = layer.weight.dequantize()
    sparse = {**layer.state_dict(), "weight": torch.ones(32, 32).to_sparse()}
    with pytest.raises(RuntimeError, match='the parameter named "weight"'):
        layer.load_state_dict(sparse)
    assert torch.equal(layer.weight.dequantize(), before)
