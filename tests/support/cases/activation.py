"""Activations in float64 torch, and the shapes that the tests and the benchmark share."""

import torch

PLAIN = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": torch.nn.functional.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
GATED["clamped_swiglu"] = "silu"  # with both halves clamped
GATED["glu"] = "sigmoid"
KINDS = [*PLAIN, *GATED]
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}

# (rows, n): sizes at and beside multiples of a tile and of a vector, thin and empty tensors.
SHAPES = [(64, 128), (128, 64), (96, 80), (130, 72), (33, 257), (7, 1), (1, 40), (0, 16), (3, 0)]
SANITIZE_SHAPES = [(65, 72), (3, 5)]

# (rows, n, kind) of the benchmark: large, medium, and the width of a small model.
BENCHMARK_SHAPES = [
    (8192, 16384, "gelu"),
    (8192, 14336, "swiglu"),
    (8192, 4096, "gelu"),
    (8192, 4096, "swiglu"),
    (8192, 4096, "clamped_swiglu"),
    (8192, 3072, "gelu"),
]


def clamped(x: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
    """The clamped SwiGLU of gpt-oss, in the dtype of `x`.

    `torch.where` passes the gradient of a value that equals the limit. The gradient of `clamp` at
    the limit differs between releases of torch.
    """
    gate, linear = x.chunk(2, dim=-1)
    gate, linear = (torch.where(half > limit, limit, half) for half in (gate, linear))
    linear = torch.where(linear < -limit, -limit, linear)
    return gate * torch.sigmoid(alpha * gate) * (linear + offset)


def reference(name: str, x: torch.Tensor, **numbers: float) -> torch.Tensor:
    """The definition, in the dtype of `x`; `numbers` are options of clamped SwiGLU."""
    if name == "clamped_swiglu":
        return clamped(x, **{**GPT_OSS, **numbers})
    if name in PLAIN:
        return PLAIN[name](x)
    first, second = x.chunk(2, dim=-1)
    return {**PLAIN, "sigmoid": torch.sigmoid}[GATED[name]](first) * second


def reference_backward(
    name: str, dy: torch.Tensor, x: torch.Tensor, **numbers: float
) -> torch.Tensor:
    """`dx` by autograd in float64."""
    x = x.double().detach().requires_grad_()
    return torch.autograd.grad(reference(name, x, **numbers), x, dy.double())[0]


def width(name: str, n: int) -> int:
    """The size of the last dimension of `x` that gives `n` outputs."""
    return 2 * n if name in GATED else n


def inputs(
    name: str, rows: int, n: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x` and `dy` for `n` outputs per row, drawn on the CPU."""
    x = (torch.randn(rows, width(name, n), device="cpu") * 2).to(dtype)
    dy = torch.randn(rows, n, device="cpu").to(dtype)
    return x.to(device), dy.to(device)
