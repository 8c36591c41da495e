"""Values of a state dict, cast with the saved scales, get the codes that they had."""

from typing import Any

import pytest
import torch
from fp8_kinds import KINDS, NAMES, codes, scales
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.weight_quantizer import WeightQuantizer
from transformer_engine.pytorch.tensor.writing import ShardRanks

kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def weight(kind: type[QuantizedTensor], device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A weight whose scales differ from those that a cast of its values would find."""
    with te.quantized_model_init(recipe=KINDS[kind]):
        made = te.Linear(160, 256, bias=False, params_dtype=dtype, device=device).weight.detach()
    made.copy_(225.0 * made.dequantize(dtype=torch.float32))
    made.parts[0].copy_(torch.where(codes(made) & 0x7F > 0x70, 0x70, codes(made)))
    return made


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [None, torch.float32, torch.bfloat16])
def test_codes_come_back(
    dtype: torch.dtype, loaded: torch.dtype | None, kind: type[QuantizedTensor], device: str
) -> None:
    """Also if the values were converted to another dtype."""
    made = weight(kind, device, dtype)
    values = made.dequantize().to(loaded or dtype)
    quantizer = WeightQuantizer.writing(made)
    found = quantizer.restored(values, made.scales, dtype)
    assert_bitwise(found.codes, codes(made))
    assert_bitwise(found.scales, scales(made))
    assert not torch.equal(quantizer.restored(values, None, dtype).scales, scales(made))


@kinds
@pytest.mark.parametrize("loaded", [torch.float16, torch.bfloat16])
def test_subnormal_values_of_fp16(
    loaded: torch.dtype, kind: type[QuantizedTensor], device: str
) -> None:
    """They have fewer significant bits than normal values, also after a conversion to bf16."""
    made = weight(kind, device, torch.float16)
    made.copy_(1e-5 * made.dequantize(dtype=torch.float32))
    values = made.dequantize().to(loaded)
    found = WeightQuantizer.writing(made).restored(values, made.scales, torch.float16)
    assert_bitwise(found.scales, scales(made))


def test_each_block_decides_for_itself(device: str) -> None:
    with te.quantized_model_init(recipe=Float8BlockScaling()):
        made = te.Linear(256, 256, bias=False, device=device).weight.detach()
    values = made.dequantize()
    values[:128, 128:] *= 0.01
    found = WeightQuantizer.writing(made).restored(values, made.scales, made.dtype)
    changed = found.scales != scales(made)
    assert changed.nonzero().tolist() == [[0, 1]]


def test_ranks_with_pieces_of_a_weight_decide_alike(device: str) -> None:
    class OtherRanks(ShardRanks):
        """Ranks that report whether the values of their pieces were edited."""

        def __init__(self, edited: bool) -> None:
            super().__init__(groups=())
            self.edited = edited

        def reduce(self, amaxes: torch.Tensor, label: str) -> torch.Tensor:
            return amaxes.maximum(amaxes.new_tensor([0.0, float(self.edited)]))

    made = weight(next(iter(KINDS)), device)
    for edited in (False, True):
        quantizer = WeightQuantizer.writing(made).over(OtherRanks(edited))
        found = quantizer.restored(made.dequantize(), made.scales, made.dtype)
        assert torch.equal(found.scales, scales(made)) is not edited
