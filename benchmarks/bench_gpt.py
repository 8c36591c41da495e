"""A GPT of 125M parameters (12 layers h768, s1024, b8), which is small enough to be host-bound.

`layers` is forward + backward of the stack of layers, for which there is a bar. `step` is a whole
training step with embeddings, loss and AdamW. `ratio` is relative to plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import contenders
import torch
import torch.nn.functional as F
from contenders import FACTORY, PlainLayer, Size, our_layer, precision, random, step
from harness import Report, over, require_gpu, time_gpu_each
from torch import nn

SIZE = Size(hidden=768, ffn=3072, heads=12, sequence=1024, batch=8)
LAYERS, VOCABULARY = 12, 50304
BARS = {"bf16": 0.75, "fp8 delayed": 0.62, "fp8 current": 0.62}


class GPT(nn.Module):
    """Embeddings, layers, norm and a head; returns the loss."""

    def __init__(
        self, make_layer: Callable[[Size], nn.Module], size: Size = SIZE, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.hidden, **FACTORY)
        self.position = nn.Embedding(size.sequence, size.hidden, **FACTORY)
        self.layers = nn.Sequential(*(make_layer(size) for _ in range(layers)))
        self.norm = nn.LayerNorm(size.hidden, **FACTORY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.token(tokens) + self.position(places))
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def training_step(
    model: nn.Module, tokens: torch.Tensor, name: str, capturable: bool = False, group: Any = None
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision(name, group):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()

    return run


def measure(report: Report, op: str, steps: dict[str, Callable[[], None]], judge: bool) -> None:
    times = time_gpu_each(steps, repeats=30, warmup=10)
    for name, timing in times.items():
        row = {"op": op, "case": name, **over(timing, times["torch"].median_us)}
        if judge and name in BARS:
            row.update(bar=BARS[name], better="lower")
        report.row(**row)


def prepare() -> tuple[dict[str, GPT], torch.Tensor, torch.Tensor]:
    """The models by precision, an input for the layers, and tokens."""
    models = {"torch": GPT(PlainLayer)}
    models |= {name: GPT(our_layer) for name in contenders.RECIPES}
    x = random(SIZE.batch, SIZE.sequence, SIZE.hidden)
    return models, x, torch.randint(VOCABULARY, (SIZE.batch, SIZE.sequence + 1), device=x.device)


def main() -> None:
    require_gpu()
    report = Report("gpt")
    models, x, tokens = prepare()
    stacks = {name: step(model.layers, x, name) for name, model in models.items()}
    measure(report, "layers", stacks, judge=True)
    whole = {name: training_step(model, tokens, name) for name, model in models.items()}
    measure(report, "step", whole, judge=False)
    report.save()


if __name__ == "__main__":
    main()
