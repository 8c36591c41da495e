"""Activations in every form that layers use, and in torch eager, relative to a device copy.

`ratio` is the time of a device copy of as many bytes, divided by the time of the activation.
"""

import sys
from pathlib import Path

import torch
from harness import Report, of_copy, require_gpu, time_gpu_each

from transformer_engine.pytorch.kernels import activation as op

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from cases import activation as cases

BARS = {"forward": 0.90, "forward fp8": 0.85, "backward": 0.90, "backward dbias fp8": 0.84}
BARS |= {"backward dbias again": 0.90, "backward dbias fp8 again": 0.84}


def calls(name: str, x: torch.Tensor, dy: torch.Tensor) -> dict:
    """The calls by name: ours in every form that layers use, and torch's forward and backward."""
    kind = op.activation_kind(name)
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    fp8 = dict(plain=False, scale=scale, amax=amax, rowwise=True, columnwise=True)
    codes = torch.empty(dy.shape[::-1], dtype=torch.uint8, device="cuda")
    again = dict(again=codes, again_scales=torch.ones(2, device="cuda"))
    leaf = x.detach().requires_grad_()
    y = cases.reference(name, leaf)
    return {
        "forward": lambda: op.activation_forward(x, kind),
        "forward torch": lambda: cases.reference(name, x),
        "forward fp8": lambda: op.activation_forward(x, kind, **fp8),
        "forward fp8 row-wise": lambda: op.activation_forward(
            x, kind, **{**fp8, "columnwise": False}
        ),
        "forward current": lambda: op.activation_forward(x, kind, current=True),
        "backward": lambda: op.activation_backward(dy, x, kind),
        "backward torch": lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True),
        "backward dbias": lambda: op.activation_backward(dy, x, kind, dbias=x.dtype),
        "backward dbias fp8": lambda: op.activation_backward(dy, x, kind, dbias=x.dtype, **fp8),
        "backward dbias again": lambda: op.activation_backward(
            dy, x, kind, dbias=x.dtype, again=dy
        ),
        "backward dbias fp8 again": lambda: op.activation_backward(
            dy, x, kind, dbias=x.dtype, **fp8, **again
        ),
    }


def bytes_per_output(call: str, inputs: int) -> int:
    """Bytes that must move per element of `y`; `inputs` is 2 for gated activations, else 1."""
    written = 2  # bf16, or one byte for each of two sides
    if call.startswith("forward"):
        return 2 * inputs + (1 if call.endswith("row-wise") else written)
    again = 0 if not call.endswith("again") else 1 if "fp8" in call else 2
    return 2 + 2 * inputs + written * inputs + again


def main() -> None:
    require_gpu()
    report = Report("activation")
    for rows, n, name in cases.BENCHMARK_SHAPES:
        width = cases.width(name, n)
        x = torch.randn(rows, width, device="cuda").bfloat16()
        dy = torch.randn(rows, n, device="cuda").bfloat16()
        for call, timing in time_gpu_each(calls(name, x, dy)).items():
            moved = rows * n * bytes_per_output(call, width // n)
            bar = {"bar": BARS[call]} if call in BARS else {}
            report.row(op=f"{name} {call}", case=f"{rows}x{width}", **bar, **of_copy(timing, moved))
        del x, dy
    report.save()


if __name__ == "__main__":
    main()
