"""Linear, LayerNormLinear, LayerNormMLP against float64: outputs and gradients, every precision."""

import pytest
import torch
from module_reference import LEAST, forward, sqnr

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "other blocks": Float8BlockScaling(
        use_f32_scales=True, w_block_scaling_dim=1, x_block_scaling_dim=2
    ),
}
MODULES = {
    "linear": lambda **k: te.Linear(64, 96, **k),
    "linear without bias": lambda **k: te.Linear(64, 96, bias=False, **k),
    "norm linear": lambda **k: te.LayerNormLinear(64, 96, **k),
    "rms linear": lambda **k: te.LayerNormLinear(
        64, 96, normalization="RMSNorm", zero_centered_gamma=True, bias=False, **k
    ),
    "mlp": lambda **k: te.LayerNormMLP(64, 128, **k),
    "swiglu mlp": lambda **k: te.LayerNormMLP(
        64, 128, activation="swiglu", normalization="RMSNorm", **k
    ),
}


def run_steps(module, precision: str, x: torch.Tensor, steps: int) -> torch.Tensor:
    """A few steps, so that delayed scaling has a history; gradients are those of the last."""
    recipe = RECIPES.get(precision)
    for _ in range(steps):
        module.zero_grad()
        x.grad = None
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = module(x)
        y.backward(gradient(y.shape).to(y))
    return y


def gradient(shape: torch.Size) -> torch.Tensor:
    """The same for every device and dtype; a mean of 0.5 avoids cancellation in column sums."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16().double() + 0.5


@pytest.mark.parametrize("tokens", [(4, 8), (3, 7)], ids=["aligned", "odd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_module_against_float64(device: str, name: str, precision: str, tokens) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    module = MODULES[name](device=device, params_dtype=dtype, name="layer")
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(*tokens, 64, device=device, dtype=dtype, requires_grad=True)
    te.gemm_report(reset=True)
    y = run_steps(module, precision, x, 2)
    report = te.gemm_report()
    kind = "fp8" if precision in RECIPES else precision
    assert report.total(kind) == report.total() > 0

    p64 = {n: p.detach().cpu().double().requires_grad_() for n, p in module.named_parameters()}
    x64 = x.detach().cpu().double().requires_grad_()
    y64 = forward(module, x64, p64)
    y64.backward(gradient(y64.shape).to(dtype).double())
    results = {"out": sqnr(y, y64), "dgrad": sqnr(x.grad, x64.grad)}
    results |= {n: sqnr(p.grad, p64[n].grad) for n, p in module.named_parameters()}
    assert min(results.values()) >= LEAST[precision], results
