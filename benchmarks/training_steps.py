"""Complete training steps of the rows of bench_training, with each library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from contenders import DEVICE, RECIPES, precision
from harness import captured
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_models import Architecture, Model, our_model, plain_model

import transformer_engine.pytorch as te

LEARNING_RATE, BETAS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 0.1
LARGEST_NORM = 1.0  # to which the norm of all gradients is clipped
BATCHES = 8  # batches in memory, which are used in turn
WORDS = 1024  # different tokens in the data
BEFORE_CAPTURE = 11  # warm-up steps that DistributedDataParallel needs
ON_GPU = DEVICE == "cuda"
FP8_ATTENTION = replace(RECIPES["fp8 delayed"], fp8_dpa=True)
FASTEST_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Row:
    """The library and options of a row of the table.

    Attributes:
        library: `ours`, `torch` or `torchao`.
        precision: precision of our layers, a key of `contenders.RECIPES`.
        fp8_weights: the model keeps its weights only in FP8.
        fp8_head: the projection to the vocabulary is in FP8, too.
        fp8_attention: attention is in FP8, too, with delayed scaling.
        compiled: forward and backward go through `torch.compile`, in its default mode.
        in_graphs: the whole step, optimizer included, is one CUDA graph.
    """

    library: str
    precision: str = "bf16"
    fp8_weights: bool = False
    fp8_head: bool = False
    fp8_attention: bool = False
    compiled: bool = False
    in_graphs: bool = False

    def __str__(self) -> str:
        kind = "fp8 weights" if self.fp8_weights else self.precision
        words = [f"ours {kind}" if self.library == "ours" else self.library]
        words += ["fp8 head"] * self.fp8_head + ["fp8 attention"] * self.fp8_attention
        words += ["compiled"] * self.compiled + ["in graphs"] * self.in_graphs
        return ", ".join(words)

    @property
    def missing(self) -> str | None:
        """The package that this row needs and that is not installed; None if there is none."""
        return "torchao" if self.library == "torchao" and find_spec("torchao") is None else None


def build(row: Row, sizes: Architecture, **options: Any) -> Model:
    """The model of a row, with random weights; `options` are arguments of `our_model`."""
    torch.manual_seed(0)
    if row.library == "ours":
        recipe = RECIPES[row.precision]
        with te.fp8_model_init(row.fp8_weights, recipe, preserve_high_precision_init_val=True):
            return our_model(sizes, row.fp8_head, **options)
    model = plain_model(sizes)
    if row.library == "torchao":
        import_module("torchao.float8").convert_to_float8_training(model.layers)
    return model


def scope(row: Row, group: Any = None) -> AbstractContextManager[Any]:
    """The context of a forward: `fp8_autocast`, or for torch its fastest attention backends."""
    if row.fp8_attention:
        return te.fp8_autocast(enabled=True, fp8_recipe=FP8_ATTENTION, fp8_group=group)
    if row.library == "ours":
        return precision(row.precision, group)
    return sdpa_kernel(FASTEST_ATTENTION, set_priority=True) if ON_GPU else nullcontext()


class OneGpu:
    """Training on a single GPU; classes for training on several ranks override the methods.

    Args:
        group: the ranks that reduce amaxes together; None is all.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def build(self, row: Row, sizes: Architecture) -> Model:
        """Make the model, or this rank's part of it."""
        return build(row, sizes)

    def wrap(self, model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
        """Wrap the model; returns the module to call."""
        return model

    def own(self, data: torch.Tensor) -> torch.Tensor:
        """Select the sequences of this rank from those of all ranks."""
        return data

    def finish(self, model: Model) -> None:
        """Complete the gradients after a backward, if they must be summed over ranks."""

    def clip_factor(self, weights: list[nn.Parameter]) -> torch.Tensor:
        """The factor that clips the norm of all gradients."""
        return te.optimizers.clip_factor(weights, LARGEST_NORM)[1]


class TorchAdam:
    """AdamW of torch on fp32 master weights, which are rounded into the weights after each step.

    The norm of the gradients and the clip factor stay on the device, so the host never waits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(_initial(weight)) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            _groups(self.masters), lr=LEARNING_RATE, betas=BETAS, fused=True, capturable=ON_GPU
        )
        pairs = list(zip(self.weights, self.masters, strict=True))
        self.plain = [pair for pair in pairs if not isinstance(pair[0], te.QuantizedTensor)]
        self.fp8 = [pair for pair in pairs if isinstance(pair[0], te.QuantizedTensor)]

    @torch.no_grad()
    def step(self) -> None:
        """Clip, step and round; gradients are then None."""
        nn.utils.clip_grad_norm_(self.weights, LARGEST_NORM)
        gradients = [torch.empty_like(master) for master in self.masters]
        torch._foreach_copy_(gradients, [weight.grad for weight in self.weights])
        for weight, master, gradient in zip(self.weights, self.masters, gradients, strict=True):
            weight.grad, master.grad = None, gradient
        del gradients
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights, masters = (list(side) for side in zip(*self.plain, strict=True))
        torch._foreach_copy_(weights, masters)
        for weight, master in self.fp8:
            weight.copy_(master)


class OurAdam:
    """Our FusedAdam with fp32 master weights, which clips, steps and rounds in one pass.

    Of master weights, only the bits that bf16 weights lack are stored.
    """

    def __init__(self, model: nn.Module, way: OneGpu) -> None:
        self.weights, self.way = list(model.parameters()), way
        self.optimizer = te.optimizers.FusedAdam(
            _groups(self.weights),
            lr=LEARNING_RATE,
            betas=BETAS,
            master_weights=True,
            store_param_remainders=True,
            capturable=True,
        )

    def step(self) -> None:
        """Clip, step and round; gradients are then None."""
        self.optimizer.step(grad_factor=self.way.clip_factor(self.weights))
        for weight in self.weights:
            weight.grad = None


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups: weight decay for matrices, none for biases and norms."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _initial(weight: Any) -> torch.Tensor:
    """The initial value in fp32; for FP8 weights, the value before rounding."""
    if not isinstance(weight, te.QuantizedTensor):
        return weight.detach().float()
    start = weight.get_high_precision_init_val()
    weight.clear_high_precision_init_val()
    return start.to(weight.device, torch.float32)


def batches(sizes: Architecture, batch: int) -> torch.Tensor:
    """Sequences in which 90 % of tokens follow from the one before, `[BATCHES, batch, s + 1]`.

    So a model can learn something. The data is the same for all rows.
    """
    generator = torch.Generator().manual_seed(1)
    words, count, length = min(WORDS, sizes.vocabulary), BATCHES * batch, sizes.sequence + 1
    follows = torch.randperm(words, generator=generator)
    tokens = torch.randint(words, (length, count), generator=generator)
    known = torch.rand(length, count, generator=generator) < 0.9
    for i in range(1, length):
        tokens[i] = torch.where(known[i], follows[tokens[i - 1]], tokens[i])
    return tokens.t().reshape(BATCHES, batch, length).to(DEVICE)


class Training:
    """A model that is trained; `step` is what is measured.

    Args:
        row: library and options.
        sizes: sizes of the model.
        batch: sequences in a step, of all ranks together.
        torch_adam: whether to use torch's optimizer for our model, too.
        way: how ranks share the training; a single GPU by default.

    Attributes:
        done: steps after those of `start`.
        peak: peak memory in bytes of the steps that `start` has run.
    """

    def __init__(
        self,
        row: Row,
        sizes: Architecture,
        batch: int,
        torch_adam: bool = False,
        way: OneGpu | None = None,
    ) -> None:
        self.row, self.done, self.peak = row, 0, 0
        self.way = way or OneGpu()
        # Autograd nodes that a wrapper keeps run on the stream on which they were made.
        self.stream = torch.cuda.Stream() if row.in_graphs and ON_GPU else None
        with self._on_stream():
            self.model = self.way.build(row, sizes)
            self.call = self.way.wrap(self.model)
            ours = row.library == "ours" and not torch_adam
            self.optimizer = OurAdam(self.model, self.way) if ours else TorchAdam(self.model)
        self.data = self.way.own(batches(sizes, batch))
        self.tokens = self.data[0].clone()  # the input of a graph, at a fixed address
        self.loss = torch.zeros((), device=DEVICE)
        self.run: Callable[[], Any] = self._step

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _step(self, sequences: int | None = None) -> None:
        with scope(self.row, self.way.group):
            loss = self.call(self.tokens[:sequences])
        loss.backward()
        self.way.finish(self.model)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def start(self) -> None:
        """Compile, capture, and run the first steps, all on one batch."""
        if ON_GPU:
            torch.cuda.synchronize()
        with self._on_stream():
            # The first step is eager, because compiled code needs the FP8 scales that this step
            # creates. It has one sequence, because eager steps need more memory than compiled ones.
            self._step(sequences=1 if self.row.compiled else None)
            if self.row.compiled:
                backend = "inductor" if ON_GPU else "aot_eager"
                self.call = torch.compile(self.model, backend=backend, dynamic=False)
            self._step()  # memory of the compiler must not count
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self.stream is not None:
            self.run = captured(self._step, self.stream, BEFORE_CAPTURE)
        else:
            for _ in range(3):
                self._step()
        if ON_GPU:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated()

    def step(self) -> None:
        """One step on the next batch."""
        self.tokens.copy_(self.data[self.done % BATCHES])
        self.run()
        self.done += 1

    def mean_loss(self) -> float:
        """The mean loss of further steps, one on each batch."""
        losses = []
        for _ in range(BATCHES):
            self.step()
            losses.append(self.loss.clone())
        return torch.stack(losses).mean().item()
