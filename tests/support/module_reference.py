"""Linear, LayerNormLinear and LayerNormMLP in float64, and bounds for errors of FP8."""

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
GATED["glu"] = "sigmoid"


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "clamped_swiglu":
        a, b = x.chunk(2, dim=-1)
        a = a.clamp(max=7)
        return a * torch.sigmoid(1.702 * a) * (b.clamp(-7, 7) + 1)
    name = "srelu" if name == "squared_relu" else name
    if name in GATED:
        a, b = x.chunk(2, dim=-1)
        return ACTIVATIONS[GATED[name]](a) * b
    return ACTIVATIONS[name](x)


def norm(x: torch.Tensor, module: torch.nn.Module, p: dict[str, torch.Tensor]) -> torch.Tensor:
    gamma = p["layer_norm_weight"] + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * gamma
    return F.layer_norm(x, x.shape[-1:], gamma, p["layer_norm_bias"], module.eps)


def forward(module: torch.nn.Module, x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the expected output of a module, from parameters `p` by name."""
    kind = type(module).__name__
    if kind != "Linear":
        x = norm(x, module, p)
    if kind != "LayerNormMLP":
        return F.linear(x, p["weight"], p.get("bias"))
    h = activate(F.linear(x, p["fc1_weight"], p.get("fc1_bias")), module.activation)
    return F.linear(h, p["fc2_weight"], p.get("fc2_bias"))


def sqnr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the signal to quantisation noise ratio in dB."""
    expected = expected.detach().cpu().double()
    noise = (actual.detach().cpu().double() - expected).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise.clamp(min=1e-300)))


# Smallest SQNR in dB of outputs and gradients. fp32 on the GPU multiplies in TF32 (11 bits: 60 dB
# and more); bf16 has 8 bits, so about 48 dB for one rounding and a few dB less after several; E4M3
# has 4 bits (28 dB per GEMM), E5M2 3 bits (22 dB).
LEAST = {"fp32": 55.0, "bf16": 38.0, "delayed": 17.0, "current": 17.0}
LEAST |= {"blocks": 20.0, "other blocks": 20.0}  # gradients are E4M3, too
