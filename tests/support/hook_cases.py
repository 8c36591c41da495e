"""Small modules, a training loop, and features that record or modify tensors."""

import torch

import transformer_engine.pytorch as te

MODULES = {
    "linear": lambda **k: te.Linear(32, 48, **k),
    "norm linear": lambda **k: te.LayerNormLinear(32, 48, **k),
    "mlp": lambda **k: te.LayerNormMLP(32, 64, **k),
    "swiglu mlp": lambda **k: te.LayerNormMLP(
        32, 64, activation="swiglu", normalization="RMSNorm", **k
    ),
}


class Recorder:
    """A feature that records every call and changes no tensor."""

    def __init__(self) -> None:
        self.calls = []

    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        self.calls.append(("inspect?", layer_name, tensor_name, iteration))
        return True

    def inspect_tensor_postquantize_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True, iteration + 1

    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration, **more):
        self.calls.append(("inspect", layer_name, tensor_name, tuple(tensor.shape), iteration))

    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, gemm, tensor, iteration):
        self.calls.append(("after", layer_name, tensor_name, gemm, type(tensor).__name__))


class Modifier:
    """A feature that doubles tensors."""

    def __init__(self) -> None:
        self.calls = []

    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True, iteration + 1

    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False, None

    def modify_tensor(
        self, config, layer_name, tensor_name, gemm, tensor, default_quantizer, iteration, out=None
    ):
        self.calls.append((tensor_name, gemm, out is not None))
        if out is not None:
            out.copy_(tensor * 2)
            return None
        return tensor * 2


class HighPrecision:
    def fp8_gemm_enabled(self, config, layer_name, gemm, iteration):
        return False, iteration + 1


def build(name: str, device: str, dtype=torch.bfloat16):
    torch.manual_seed(3)
    module = MODULES[name](device=device, params_dtype=dtype, name="layer")
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def train(module, recipe, tokens=(4, 8), steps=2, after_step=lambda: None):
    """Trains a few steps; returns outputs, input gradients and parameter gradients."""
    results = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(*tokens, 32, generator=generator)
        x = x.to(next(module.parameters())).requires_grad_()
        module.zero_grad()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = module(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        after_step()
    return results
