"""Generation, with a cache of keys and values and without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

import transformer_engine.pytorch as te
from gpt.settings import Settings, UsageError
from gpt.training import arithmetic


class Written(NamedTuple):
    """What was generated.

    Attributes:
        texts: each prompt and what follows it.
        steps: calls of the model.
        rate: bytes a second, of all texts together.
    """

    texts: list[bytes]
    steps: int
    rate: float


class Dice:
    """Picks each text's next byte; every text has a generator of its own."""

    def __init__(self, texts: int, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(seed + i) for i in range(texts)]

    def __call__(self, text: int, logits: torch.Tensor) -> int:
        """A byte for the text with this number, by its `logits [256]`."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        chances = (logits.float().cpu() / self.temperature).softmax(-1)
        return int(torch.multinomial(chances, 1, generator=self.generators[text]))


def _encoded(prompts: Sequence[str], count: int, settings: Settings) -> list[bytearray]:
    texts = [bytearray(prompt.encode()) for prompt in prompts]
    if not all(texts) or count < 1:
        raise UsageError("expected prompts that are not empty, and a byte or more to write")
    longest = max(map(len, texts)) + count
    if longest > settings.seq:
        raise UsageError(
            f"prompt and text have {longest} bytes, and the model was trained on windows of "
            f"{settings.seq}; lower --bytes"
        )
    return texts


@torch.no_grad()
def write(
    model: nn.Module,
    settings: Settings,
    prompts: Sequence[str],
    count: int,
    temperature: float = 0.0,
    seed: int = 1,
) -> Written:
    """Write `count` bytes after each prompt; every step gives the model one new byte a text.

    Prompts may differ in length: while the longest is still read, the shorter ones are written.
    """
    texts, dice = _encoded(prompts, count, settings), Dice(len(prompts), temperature, seed)
    ends = [len(text) + count for text in texts]
    cache = te.InferenceParams(len(texts), settings.seq)
    seen, steps, began = 0, 0, time.perf_counter()
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        known = min(map(len, texts))
        new = torch.tensor([list(text[seen:known]) for text in texts], device=settings.device)
        with arithmetic(settings):
            logits = model(new, cache)[:, -1]
        for i, (text, end) in enumerate(zip(texts, ends, strict=True)):
            if len(text) == known:  # else its prompt is still being read
                text.append(dice(i, logits[i]) if known < end else 0)  # 0: done, others go on
        cache.sequence_len_offset = seen = known
        steps += 1
    done = [bytes(text[:end]) for text, end in zip(texts, ends, strict=True)]
    return Written(done, steps, len(texts) * count / (time.perf_counter() - began))


@torch.no_grad()
def without_cache(
    model: nn.Module,
    settings: Settings,
    prompts: Sequence[str],
    count: int,
    temperature: float = 0.0,
    seed: int = 1,
) -> list[bytes]:
    """The same texts, by calls that see all bytes anew."""
    texts, dice = _encoded(prompts, count, settings), Dice(len(prompts), temperature, seed)
    for i, text in enumerate(texts):
        for _ in range(count):
            tokens = torch.tensor([list(text)], device=settings.device)
            with arithmetic(settings):
                logits = model(tokens)[0, -1]
            text.append(dice(i, logits))
    return [bytes(text) for text in texts]
