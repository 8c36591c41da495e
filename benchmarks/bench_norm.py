"""Norms in every form that layers use, and in torch eager, relative to a device copy.

`ratio` is the time of a device copy of as many bytes, divided by the time of the norm.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from harness import Report, of_copy, require_gpu, time_gpu_each

from transformer_engine.pytorch.kernels.norm import LAYER_NORM, RMS_NORM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from cases import norm as cases

NAMES = {LAYER_NORM: "layernorm", RMS_NORM: "rmsnorm"}
BARS = {
    "layernorm forward": 0.93,
    "rmsnorm forward": 0.95,
    "layernorm forward fp8": 0.85,
    "rmsnorm forward fp8": 0.85,
    "layernorm backward": 0.80,
    "rmsnorm backward": 0.87,
}
JUDGED = 2**23  # elements from which on bars apply; below, launch times dominate
# Bytes that must move per element of bf16: x, and y or the codes of y; dy, x and dx.
MOVED = {
    "forward": 4,
    "forward current": 4,
    "forward fp8": 4,
    "forward fp8 rowwise": 3,
    "backward": 6,
    "backward residual": 8,
}


def torch_norm(case: cases.Case, x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    shape = x.shape[-1:]
    if case.kind == LAYER_NORM:
        return torch.nn.functional.layer_norm(x, shape, *parameters, eps=case.epsilon)
    return torch.nn.functional.rms_norm(x, shape, *parameters, eps=case.epsilon)


def calls(case: cases.Case) -> dict:
    """The calls by name: ours in every form that layers use, and torch's forward and backward."""
    dtype, x = case.x.dtype, case.x
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    delayed = {"scale": scale, "amax": amax, "rowwise": True}
    *_, mean, rstd = case.forward(dtype)
    residual = torch.randn_like(x)
    leaves = [t.detach().requires_grad_() for t in (x, case.gamma, case.beta) if t is not None]
    y = torch_norm(case, leaves[0], leaves[1:])
    return {
        "forward": lambda: case.forward(dtype),
        "forward torch": lambda: torch_norm(case, x, [t.detach() for t in leaves[1:]]),
        "forward current": lambda: case.forward(dtype, current=True),
        "forward fp8": lambda: case.forward(columnwise=True, **delayed),
        "forward fp8 rowwise": lambda: case.forward(**delayed),
        "backward": lambda: case.backward(mean, rstd),
        "backward torch": lambda: torch.autograd.grad(y, leaves, case.dy, retain_graph=True),
        "backward residual": lambda: case.backward(mean, rstd, residual),
    }


def main() -> None:
    require_gpu()
    report = Report("norm")
    for shape in cases.BENCHMARK_SHAPES:
        for kind, name in NAMES.items():
            bf16 = (torch.bfloat16,) * 3
            case = cases.Case(kind, shape, bf16, "cuda")
            for call, timing in time_gpu_each(calls(case)).items():
                op = f"{name} {call}"
                judged = op in BARS and case.x.numel() >= JUDGED
                bar = {"bar": BARS[op]} if judged else {}
                moved = case.x.numel() * MOVED[call.removesuffix(" torch")]
                rows, cols = shape
                report.row(op=op, case=f"{rows}x{cols}", **bar, **of_copy(timing, moved))
            del case
    report.save()


if __name__ == "__main__":
    main()
