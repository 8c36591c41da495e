"""A user's feature, as in docs/how-to/add_feature.md: it emulates another precision."""

import pytest
import torch
from fake_manager import session
from hook_cases import build, train
from precisions import RECIPES, scope


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds to nearest even, to `bits` bits after the leading one."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round(), exponent - bits - 1).to(x.dtype)


class RoundMantissa:
    """Emulates a format with `bits` mantissa bits in every selected GEMM."""

    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False

    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True

    def modify_tensor(
        self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, out=None
    ):
        rounded = round_mantissa(tensor, config["bits"])
        if out is None:
            return rounded
        out.copy_(rounded)
        return None


def test_rounding_is_what_it_says() -> None:
    x = torch.tensor([1.0, 1.125, 1.375, -3.9, 0.0, 2.0**-130])
    assert round_mantissa(x, 2).tolist() == [1.0, 1.0, 1.5, -4.0, 0.0, 2.0**-130]
    full = torch.randn(100, dtype=torch.bfloat16)
    assert torch.equal(round_mantissa(full, 7), full)


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_precision(device: str, recipe: str) -> None:
    module = build("linear", device)
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(16, 48, dtype=torch.bfloat16, device=device)
    config = {"bits": 2, "tensors": ["activation", "weight", "gradient"]}
    with session(("layer", RoundMantissa(), config)):
        with scope(recipe):
            y = module(x)
        y.backward(dy)
    rx, rw, rdy = (round_mantissa(t.detach(), 2).float() for t in (x, module.weight, dy))
    for actual, expected in (
        (y, torch.nn.functional.linear(rx, rw, module.bias.float())),
        (x.grad, rdy @ rw),
        (module.weight.grad, rdy.T @ rx),
    ):
        torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-5)


def test_all_mantissa_bits_are_no_change(device: str) -> None:
    expected = train(build("norm linear", device), None)
    config = {"bits": 7, "tensors": ["activation", "weight", "gradient"]}
    with session(("layer", RoundMantissa(), config)) as s:
        actual = train(build("norm linear", device), None, after_step=s.step)
    for a, e in zip(actual, expected, strict=True):
        if a.ndim > 1:
            assert torch.equal(a, e)
        else:  # column sums may use another order
            torch.testing.assert_close(a, e)
