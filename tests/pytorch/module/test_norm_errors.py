"""Every bad argument of the norms is named in the error."""

import pytest
import torch
from cases.norm import EPSILON, F32

from transformer_engine.pytorch.kernels.norm import (
    LAYER_NORM,
    RMS_NORM,
    norm_backward,
    norm_forward,
)


def _forward(**changes):
    x = torch.randn(4, 16)
    arguments = {
        "x": x,
        "gamma": torch.ones(16),
        "beta": torch.zeros(16),
        "kind": LAYER_NORM,
        "epsilon": EPSILON,
        "zero_centered": False,
        "out_dtype": F32,
    }
    return norm_forward(**(arguments | changes))


def _backward(**changes):
    x = torch.randn(4, 16)
    arguments = {
        "dy": x,
        "x": x,
        "gamma": torch.ones(16),
        "mean": torch.zeros(4),
        "rstd": torch.ones(4),
        "kind": LAYER_NORM,
        "zero_centered": False,
    }
    return norm_backward(**(arguments | changes))


SCALE = torch.ones(1)
ERRORS = [
    (_forward, {"x": torch.ones(4, 16).int()}, TypeError, "float16 or bfloat16 for x, got int32"),
    (_forward, {"x": torch.ones(16, 4).T}, ValueError, "expected x to be contiguous"),
    (_forward, {"x": torch.ones(4, 0)}, ValueError, "at least one column in x, got shape"),
    (_forward, {"gamma": torch.ones(8)}, ValueError, "expected 16 elements for gamma, got shape"),
    (_forward, {"gamma": torch.ones(16).double()}, TypeError, "for gamma, got float64"),
    (_forward, {"beta": None}, ValueError, "expected a tensor for beta, got none"),
    (_forward, {"beta": torch.ones(16).half()}, TypeError, "expected float32 for beta"),
    (_forward, {"kind": RMS_NORM}, ValueError, "expected no beta for RMSNorm, got float32"),
    (_forward, {"out_dtype": None}, ValueError, "expected a plain or an FP8 output, got neither"),
    (_forward, {"out_dtype": torch.int32}, TypeError, "for y, got int32"),
    (_forward, {"current": True, "out_dtype": None}, ValueError, "got neither"),
    (
        _forward,
        {"current": True, "rowwise": True, "scale": SCALE},
        ValueError,
        "expected a plain output alone with a current scale, got FP8 outputs too",
    ),
    (_forward, {"rowwise": True, "scale": SCALE, "format": 2}, TypeError, "got float32"),
    (_forward, {"rowwise": True, "scale": torch.ones(2)}, ValueError, "1 element for scale"),
    (_forward, {"rowwise": True}, ValueError, "for the scale of FP8 outputs, got none"),
    (_backward, {"dy": torch.ones(4, 8)}, ValueError, r"expected shape \(4, 16\) for dy"),
    (_backward, {"dy": torch.ones(4, 16).int()}, TypeError, "for dy, got int32"),
    (_backward, {"mean": None}, ValueError, "expected a tensor for mean, got none"),
    (_backward, {"mean": torch.zeros(5)}, ValueError, "expected 4 elements for mean"),
    (_backward, {"rstd": torch.ones(4).half()}, TypeError, "expected float32 for rstd"),
    (_backward, {"kind": RMS_NORM}, ValueError, "expected no mean for RMSNorm"),
    (_backward, {"residual_grad": torch.ones(4, 8)}, ValueError, "for residual_grad, got"),
    (
        _backward,
        {"residual_grad": torch.ones(4, 16).half()},
        TypeError,
        "expected float32 for residual_grad, got float16",
    ),
]


@pytest.mark.parametrize("call, changes, error, message", ERRORS)
def test_errors(call, changes, error, message):
    name = "norm_forward" if call is _forward else "norm_backward"
    with pytest.raises(error, match=rf"\[{name}\] .*{message}"):
        call(**changes)
