"""Generation, with a cache of keys and values and without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

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

    def __call__(self, texts: Sequence[int], logits: torch.Tensor) -> list[int]:
        """A byte for each text of these numbers, by its row of `logits [len(texts), 256]`."""
        if self.temperature == 0.0:
            return logits.argmax(-1).tolist()
        chances = (logits.float().cpu() / self.temperature).softmax(-1)
        drawn = zip(chances, (self.generators[text] for text in texts), strict=True)
        return [int(torch.multinomial(row, 1, generator=own)) for row, own in drawn]


class Steps:
    """Calls of the model, each on the tokens that follow those of the calls before.

    With `graph` the device alone knows how many tokens there are, from the first call of one token
    a text on: all of those are the same work at the same addresses. On a GPU the first one warms
    up, the second is captured in a CUDA graph, and that graph is replayed for all others.
    """

    def __init__(self, model: nn.Module, settings: Settings, texts: int, graph: bool) -> None:
        self.model, self.settings = model, settings
        self.cache = model.cache_for(texts)
        self.replays = graph
        self.token: torch.Tensor | None = None  # what the graph reads
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None  # what it writes

    def __call__(self, new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits `[texts, 256]` of the byte after `new`, as many bytes of each text."""
        tokens = torch.tensor(new, device=self.settings.device)
        if not self.replays or tokens.shape[1] > 1:
            return self._call(tokens)
        if self.token is None:
            self.token = tokens
            self.cache.sequence_len_offset = torch.tensor(
                self.cache.sequence_len_offset, device=tokens.device
            )
            return self._call(tokens)
        self.token.copy_(tokens)
        if self.settings.device == "cpu":
            return self._call(self.token)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self._call(self.token)
        self.graph.replay()
        return self.logits

    def _call(self, tokens: torch.Tensor) -> torch.Tensor:
        with arithmetic(self.settings):
            logits = self.model(tokens, self.cache)[:, -1]
        self.cache.sequence_len_offset += tokens.shape[1]
        return logits


def cast_once(model: nn.Module, settings: Settings) -> nn.Module:
    """The model with bf16 weights where its GEMMs are bf16: autocast would cast them each step."""
    if settings.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _encoded(prompts: Sequence[str], count: int, settings: Settings) -> list[bytearray]:
    texts = [bytearray(prompt.encode()) for prompt in prompts]
    longest = max(map(len, texts))
    if longest >= settings.seq:
        raise UsageError(
            f"expected prompts shorter than {settings.seq} bytes, the window of the model, got one"
            f" of {longest}"
        )
    if not all(texts) or count < 1:
        raise UsageError("expected prompts that are not empty, and a byte or more to write")
    if longest + count > settings.seq:
        raise UsageError(
            f"prompt and text have {longest + count} bytes, and the model was trained on windows of"
            f" {settings.seq}; lower --bytes"
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
    graph: bool = False,
) -> Written:
    """Write `count` bytes after each prompt; every step gives the model one new byte a text.

    Prompts may differ in length: while the longest is still read, the shorter ones are written.
    With `graph` steps are replays of one CUDA graph, see `Steps`.
    """
    texts, dice = _encoded(prompts, count, settings), Dice(len(prompts), temperature, seed)
    ends = [len(text) + count for text in texts]
    step = Steps(model, settings, len(texts), graph)
    seen, steps, began = 0, 0, time.perf_counter()
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        known = min(map(len, texts))
        logits = step([text[seen:known] for text in texts])
        written = [i for i, end in enumerate(ends) if len(texts[i]) == known < end]
        rows = logits if len(written) == len(texts) else logits[written]
        for i, byte in zip(written, dice(written, rows), strict=True):
            texts[i].append(byte)
        for text in texts:
            if len(text) == known:
                text.append(0)  # it is done, and others go on
        seen = known
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
                logits = model(tokens)[:, -1]
            text.extend(dice([i], logits))
    return [bytes(text) for text in texts]
