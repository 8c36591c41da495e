"""Public names, and the errors for names that are not implemented."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import tensor

ABSENT = [
    (recipe, "MXFP8BlockScaling", "MXFP8"),
    (recipe, "NVFP4BlockScaling", "NVFP4"),
    (te, "MXFP8Quantizer", "MXFP8"),
    (tensor, "NVFP4Tensor", "NVFP4"),
    (te, "QuantizerRequest", "QuantizerRequest"),
    (te, "DelayedScalingRequest", "DelayedScalingRequest"),
]


@pytest.mark.parametrize(("module", "name", "what"), ABSENT)
def test_what_is_not_here_says_so(module, name: str, what: str) -> None:
    why = f"{module.__name__} has no {name}: {what} is not implemented; "
    with pytest.raises(AttributeError, match=why):
        getattr(module, name)
    with pytest.raises(ImportError, match=why):
        exec(f"from {module.__name__} import {name}")
    assert not hasattr(module, name)  # the test of programs that support several versions


def test_other_names_are_missed_as_everywhere() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Linaer'"):
        te.Linaer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Linaer'"):
        exec("from transformer_engine.pytorch import Linaer")


def test_dir_shows_what_is_public() -> None:
    assert dir(te) == sorted(te.__all__)
    assert "torch" not in dir(te)


def test_quantizers_have_names_of_their_own() -> None:
    one = torch.ones(1)
    made = [
        te.Float8Quantizer(one, one, te.DType.kFloat8E4M3),
        te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, device="cpu"),
        te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True),
    ]
    assert [repr(quantizer) for quantizer in made] == [
        "Float8Quantizer(E4M3)",
        "Float8CurrentScalingQuantizer(E5M2)",
        "Float8BlockQuantizer(E4M3, 2D)",
    ]
