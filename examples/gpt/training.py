"""A training run: steps, validation, sampling, and checkpoints from which it resumes exactly."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from gpt.checkpoint import read_checkpoint, write_checkpoint
from gpt.data import Batches, Text
from gpt.masters import MasterWeights, initial_values
from gpt.model import build_model
from gpt.ranks import OptimizerStates, Ranks, cut_like, whole
from gpt.settings import Settings, UsageError
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Recipe,
)

WARM_UP_SHARE = 0.1  # share of the steps in which the learning rate rises
FINAL_RATE = 0.1  # learning rate at the end of the cosine, as a share of the peak
WEIGHT_DECAY = 0.1  # for matrices; biases and norms have none
LARGEST_GRADIENT_NORM = 1.0
ALONE = Ranks()


class Pace(NamedTuple):
    """Mean loss and speed of some consecutive steps."""

    loss: float
    tokens_per_second: float


def recipe_of(settings: Settings) -> Recipe:
    """The FP8 recipe: E4M3 forward, E5M2 for gradients; with block scaling, E4M3 for both."""
    if settings.recipe == "blocks":
        return Float8BlockScaling()
    if settings.recipe == "delayed":
        return DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16)
    return Float8CurrentScaling(fp8_format=Format.HYBRID)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine."""
    warm_up = max(1, round(WARM_UP_SHARE * settings.steps))
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.lr * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def make_optimizer(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW in fused kernels."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


@contextmanager
def arithmetic(settings: Settings) -> Iterator[None]:
    """The precision of a forward pass.

    Parameters are always fp32: AdamW needs fp32, and casts to FP8 read fp32 directly, so no bf16
    copies are made. On a GPU, activations between FP8 GEMMs are bf16, which halves their size. On a
    CPU they are fp32, which is faster there.
    """
    fp8 = settings.precision == "fp8"
    bf16 = settings.precision == "bf16" or (fp8 and settings.device == "cuda")
    with (
        torch.autocast(settings.device, torch.bfloat16, enabled=bf16),
        te.fp8_autocast(enabled=fp8, fp8_recipe=recipe_of(settings)),
    ):
        yield


class Training:
    """A model, its optimizer, and how far they have been trained.

    Attributes:
        parameters: number of parameters of the model.
        done: number of steps taken, which is also the position in the data and in the schedule.
        interrupted: whether to end after the current step; `watching_interrupts` sets it.
        losses: training loss of every step, nats per byte, on the device; valid up to `done`.
        validation: `(steps taken, loss)` of every validation.
    """

    def __init__(self, settings: Settings, text: Text, ranks: Ranks = ALONE) -> None:
        ranks.check(settings)
        torch.manual_seed(settings.seed)
        self.settings, self.ranks = settings, ranks
        self.batches = Batches(text, settings)
        with te.fp8_model_init(
            settings.fp8_weights, recipe_of(settings), preserve_high_precision_init_val=True
        ):
            self.model = build_model(settings)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        starts = initial_values(self.model)
        self.called = ranks.spread(self.model)
        self.masters = MasterWeights(self.model, starts)
        if ranks.place:
            torch.manual_seed(settings.seed + ranks.place)  # for dropout; weights are equal
        self.optimizer = make_optimizer(self.masters.trained, settings.lr)
        self.optimizer_states = self._optimizer_states()
        self.losses = torch.zeros(settings.steps, device=settings.device)
        self.validation: list[tuple[int, float]] = []
        self.done = 0
        self.interrupted = False

    @contextmanager
    def watching_interrupts(self) -> Iterator[None]:
        """Within the `with` block, Ctrl-C ends the training after a step, a second one at once.

        On several ranks, Ctrl-C ends all of them at once: otherwise they could end after different
        steps, and wait for each other.
        """
        if self.ranks.count > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _optimizer_states(self) -> OptimizerStates:
        names = [name for name, _ in self.model.named_parameters()]
        named = {id(p): name for p, name in zip(self.masters.trained, names, strict=True)}
        order = [named[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        return OptimizerStates(self.model, order, self.optimizer)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next byte, in nats, over this rank's tokens of `windows`."""
        with arithmetic(self.settings):
            logits = self.ranks.logits(self.called, windows[:, :-1])
            return self.ranks.cross_entropy(logits, windows[:, 1:])

    def step(self) -> None:
        """One optimizer step; it does not wait for the device."""
        rate = learning_rate(self.done, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(self.ranks.own(self.batches.training(self.done)))
        loss.backward()
        self.ranks.finish_gradients(self.model, LARGEST_GRADIENT_NORM)
        self.masters.take_gradients()
        self.optimizer.step()
        self.masters.write_weights()
        self.optimizer.zero_grad()
        debug_api.step()  # does nothing without --inspect
        self.losses[self.done] = loss.detach()
        self.done += 1

    def advance(self, until: int) -> Pace:
        """Run the steps up to `until`; returns their mean loss and speed."""
        began, start = time.perf_counter(), self.done
        while self.done < until:
            self.step()
            if self.interrupted:
                break
        self.ranks.average(self.losses[start : self.done])
        loss = self.losses[start : self.done].mean().item()  # waits for the device
        tokens = (self.done - start) * self.settings.batch * self.settings.seq
        return Pace(loss, tokens / (time.perf_counter() - began))

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on all validation windows, which is appended to `validation`; all ranks call it."""
        self.model.eval()
        total = sum(self.loss(windows) * len(windows) for windows in self.batches.validation)
        self.model.train()
        self.ranks.average(total)
        loss = float(total) / sum(map(len, self.batches.validation))
        self.validation.append((self.done, loss))
        return loss

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
        """The prompt, followed by `length` bytes that the model generates."""
        self.model.eval()
        seq, text = self.settings.seq, bytearray(prompt)
        generator = torch.Generator().manual_seed(self.settings.seed)
        for _ in range(length):
            # The window is always full, so that all calls have the same shape. The zeros that
            # fill it come after the text, where a causal model does not see them.
            context = text[-seq:]
            window = torch.tensor([*context, *bytes(seq - len(context))])
            with arithmetic(self.settings):
                window = window[None].to(self.settings.device)
                logits = self.ranks.whole_logits(self.model, window)
            chances = (logits[0, len(context) - 1].float().cpu() / temperature).softmax(-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        self.model.train()
        return bytes(text)

    def save(self, path: Path) -> None:
        """Write a checkpoint with everything that the next step depends on.

        The state of the model has the FP8 scales and amax histories as `_extra_state`, and the
        scales of FP8 weights, so that the same codes are restored. Tensors are whole, whatever
        ranks have written the file, so that a run with any layout can resume from it.
        """
        state = {
            "settings": asdict(self.settings),
            "done": self.done,
            "model": whole(self.model.state_dict()),
            "masters": whole(self.masters.state_dict()),
            "optimizer": self.optimizer_states.whole(),
            "random": self.ranks.of_all(_random_states(self.settings.device)),
            "losses": self.losses,
            "validation": self.validation,
        }
        if self.ranks.number == 0:
            write_checkpoint(state, path)

    def load(self, path: Path) -> None:
        """Continue the run that wrote the checkpoint `path`."""
        state = read_checkpoint(path)
        different = self.settings.differences(Settings(**state["settings"]))
        if different:
            raise UsageError(f"--resume: {path} is of a run with {', '.join(different)}")
        self.done = state["done"]
        self.model.load_state_dict(cut_like(state["model"], self.model.state_dict()))
        self.masters.load_state_dict(state.get("masters", {}))
        self.optimizer_states.load(state["optimizer"])
        self.losses.copy_(state["losses"])
        self.validation = state["validation"]
        random = state["random"]
        random = [random] if isinstance(random, dict) else random  # an older file
        if len(random) == self.ranks.count:  # with other ranks, dropout is drawn anew
            torch.set_rng_state(random[self.ranks.number]["cpu"])
            if self.settings.device == "cuda":
                torch.cuda.set_rng_state(random[self.ranks.number]["cuda"])


def _random_states(device: str) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states
