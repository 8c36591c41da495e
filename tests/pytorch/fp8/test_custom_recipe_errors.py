"""What a `CustomRecipe` refuses, and its arguments."""

import pytest
import torch
from custom_recipes import E4M3, E5M2, MODULES, Blocks, Current, Delayed, as_current, choosing, run

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, Float8CurrentScaling
from transformer_engine.pytorch.quantization import get_align_size_for_quantization

REFUSED = {
    "one operand": (
        {"input": Current(E4M3), "grad_output": Current(E4M3)},
        "quantizers for both operands or for none of fprop, got"
        r" Float8CurrentScalingQuantizer\(E4M3\) for input and None for weight",
    ),
    "only the gradient": (
        {"grad_output": Current(E4M3)},
        "quantizers for both operands or for none of dgrad, got"
        r" Float8CurrentScalingQuantizer\(E4M3\) for grad_output and None for weight",
    ),
    "blocks and one scale": (
        {"input": Current(E4M3), "weight": Current(E4M3), "grad_output": Blocks(E4M3)},
        r"scales of blocks in both operands or in neither of dgrad, got"
        r" Float8BlockQuantizer\(E4M3, 2D\) for grad_output and"
        r" Float8CurrentScalingQuantizer\(E4M3\) for weight",
    ),
    "two in 2D blocks": (
        {
            "input": Blocks(E4M3),
            "weight": Blocks(E4M3, block_scaling_dim=1),
            "grad_output": Blocks(E4M3),
        },
        "1D blocks in one operand at least of wgrad, got .*2D.* for grad_output and .*2D.* input",
    ),
    "blocks in E5M2": (
        {"input": Blocks(E4M3), "weight": Blocks(E5M2, block_scaling_dim=1)},
        "E4M3 in both operands, because they have scales of blocks of fprop, got",
    ),
    "two in E5M2": (
        {"input": Current(E4M3), "weight": Current(E5M2), "grad_output": Current(E5M2)},
        "E5M2 in one operand at most of dgrad, got",
    ),
    "delayed scaling": (
        {"input": Delayed(torch.ones(1), torch.zeros(1), E4M3)},
        "quantizers without scaling state, got Float8Quantizer for input; use",
    ),
    "no quantizer": ({"input": 3}, "qfactory to return a quantizer or None for input, got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_gemm_multiplies_is_refused_before_it_runs(case) -> None:
    made, text = REFUSED[case]
    module = MODULES["linear"]("cpu")
    te.gemm_report(reset=True)
    with pytest.raises(Exception, match=rf"\[CustomRecipe\] expected {text}.* \(layer fc\)"):
        run(module, choosing(**made))
    assert te.gemm_report().total() == 0
    with pytest.raises(Exception, match=r"\[CustomRecipe\] expected .*\(layer fc\)"):
        run(module, choosing(**made), torch.compile(module, fullgraph=True, backend="aot_eager"))


def test_a_recipe_that_compiled_code_makes_is_refused() -> None:
    module = MODULES["linear"]("cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=CustomRecipe(as_current)):
            return module(x)

    with pytest.raises(Exception, match=r"made before compiled code runs, .* \(layer fc\)"):
        call(torch.randn(16, 64))


def test_arguments() -> None:
    for wrong in (None, "current", [as_current]):
        with pytest.raises(
            ValueError, match=r"\[CustomRecipe\] expected qfactory to be a hashable"
        ):
            CustomRecipe(wrong)
    with pytest.raises(ValueError, match=r"quantization_alignment to be an int >= 1, got 0"):
        CustomRecipe(as_current, quantization_alignment=0)
    sizes = [CustomRecipe(as_current), CustomRecipe(as_current, quantization_alignment=32)]
    assert [get_align_size_for_quantization(one) for one in sizes] == [128, 32]
    assert get_align_size_for_quantization(Float8CurrentScaling()) == 16
    for flag in ("fp8_dpa", "fp8_mha"):
        with pytest.raises(NotImplementedError, match=rf"got CustomRecipe with .*{flag}=True"):
            run(MODULES["layer"]("cpu"), CustomRecipe(as_current, **{flag: True}))


def test_weights_in_fp8_are_refused() -> None:
    with pytest.raises(ValueError, match="got CustomRecipe, whose function chooses"):
        te.quantized_model_init(recipe=CustomRecipe(as_current))
    with te.quantized_model_init():
        layer = MODULES["linear"]("cpu")
    with pytest.raises(RuntimeError, match=r"got CustomRecipe; use another .*\(layer fc\)"):
        run(layer, CustomRecipe(as_current))
