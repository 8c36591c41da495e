"""`checkpoint`: activations of a part of a model are computed again instead of saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from transformer_engine.pytorch._torch_private import graph_task, tree_flatten, tree_unflatten
from transformer_engine.pytorch.capture import is_capturing
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.recompute_regions import (
    RecomputeRegion,
    attach_region,
    recompute_context,
)
from transformer_engine.pytorch.fp8.scaled_module import ScaledModule
from transformer_engine.pytorch.notices import warn
from transformer_engine.pytorch.parallel.collectives import gather_into
from transformer_engine.pytorch.recompute.compiled import checkpoint_in_graph
from transformer_engine.pytorch.rng import StatesOf, check_tracker, snapshot, tracker_from


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run `function` now, keep none of its activations, and run it again in the backward.

    The second run uses the FP8 scope, the FP8 scales and the random numbers of the first, and
    records no amaxes. So gradients equal those of a run without checkpointing, bit for bit. Regions
    may be nested, contain autocast regions, and be called several times before their backwards.

    Inside of code that `torch.compile` compiles, the function becomes a part of the graph that the
    backward of the graph computes again; `use_reentrant` makes no difference there.

    Args:
        function: a module or another callable.
        args: the arguments of `function`. In reentrant mode, a tensor among them (or among the
            keyword arguments) must require a gradient, also within lists and dicts.
        distribute_saved_activations: in reentrant mode, each rank of `tp_group` saves only its part
            of the first tensor among the arguments. Not inside of compiled code.
        get_rng_state_tracker: returns the `CudaRNGStatesTracker` that `function` draws from. Not
            inside of compiled code.
        tp_group: process group for `distribute_saved_activations`; None is the default group.
        use_reentrant: run the backward of `function` as a separate backward within the whole one.
            This mode supports `loss.backward()` only, and saves nothing but the arguments.
        preserve_rng_state: the second run draws the random numbers of the first; in compiled code
            it always does.
        kwargs: further keyword arguments of `function`; `context_fn`, `determinism_check` and
            `debug` are torch's, for `use_reentrant=False`. In compiled code only `context_fn` has
            an effect; with it, layers with delayed scaling raise an error in the backward.

    Returns:
        What `function` returns; tensors within its lists, tuples and dicts have gradients, too.

    Raises:
        RuntimeError: `distribute_saved_activations` without `torch.distributed`; in the backward,
            `function` does something else than before, or the mode does not support the call; in a
            CUDA graph capture with `preserve_rng_state`.
        TypeError: `function` or `get_rng_state_tracker` is not callable, or the latter returns no
            tracker.
        NotImplementedError: `distribute_saved_activations` in reentrant mode or
            `get_rng_state_tracker`, inside of compiled code.

    >>> import torch
    >>> import transformer_engine.pytorch as te
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> x = torch.randn(16, 32, requires_grad=True)
    >>> with te.fp8_autocast(enabled=True):
    ...     y = te.checkpoint(layer, x)
    >>> y.sum().backward()
    >>> x.grad.shape
    torch.Size([16, 32])
    """
    if _is_positional(args):
        warn(
            "[checkpoint] distribute_saved_activations, get_rng_state_tracker and tp_group are "
            "deprecated as positional arguments: give them by keyword",
            stacklevel=2,
            category=DeprecationWarning,
        )
        distribute_saved_activations, get_rng_state_tracker, tp_group, *args = args  # type: ignore[assignment]
    _check_callable(function, get_rng_state_tracker)
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            distributes = distribute_saved_activations and use_reentrant
            _check_compiled(distributes, get_rng_state_tracker is not None)
        own, torchs = _split(kwargs, use_reentrant)
        return checkpoint_in_graph(lambda: function(*args, **own), torchs.get("context_fn"))
    if preserve_rng_state and is_capturing():
        raise RuntimeError(
            "[checkpoint] expected preserve_rng_state=False inside a CUDA graph capture, got True: "
            "a graph cannot go back to earlier random numbers; this is for functions that draw none"
        )
    random: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if not torch.is_grad_enabled():
        return function(*args, **_split(kwargs, use_reentrant)[0])
    tracker = tracker_from("checkpoint", get_rng_state_tracker, "get_states", "set_states")
    ours = not isinstance(function, nn.Module) or any(
        isinstance(module, ScaledModule) for module in function.modules()
    )
    run = _Function(function, tracker) if ours or tracker is not None else function
    if not use_reentrant:
        # The whole function must run again, as we document; torch would stop early.
        early = torch_checkpoint.set_checkpoint_early_stop(False)
        with early if ours else contextlib.nullcontext():
            return torch_checkpoint.checkpoint(run, *args, use_reentrant=False, **random, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))

    structures: list[Any] = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        args, kwargs = tree_unflatten(leaves, structure)
        results, structure_of_results = tree_flatten(run(*args, **kwargs))
        structures.append(structure_of_results)
        return tuple(map(_apart, results))

    with _distributed(tp_group) if distribute_saved_activations else contextlib.nullcontext():
        results = torch_checkpoint.checkpoint(flat, *leaves, use_reentrant=True, **random)
    return tree_unflatten(results, structures[0])


def _apart(result: Any) -> Any:
    """A result of the first forward, which runs without autograd.

    A parameter, or a result that requires a gradient, comes from outside. The checkpoint returns a
    view of it, because autograd makes every returned tensor a result of the checkpoint: the
    backward of a frozen parameter would then call itself.
    """
    if not isinstance(result, torch.Tensor) or torch.is_grad_enabled():
        return result
    outside = result.requires_grad or isinstance(result, nn.Parameter)
    return result.view_as(result) if outside else result


def _split(kwargs: dict[str, Any], use_reentrant: bool) -> tuple[dict[str, Any], ...]:
    """Keyword arguments of the function, and those of torch's checkpoint."""
    torchs = () if use_reentrant else ("context_fn", "determinism_check", "debug")
    own = {name: value for name, value in kwargs.items() if name not in torchs}
    return own, {name: kwargs[name] for name in torchs if name in kwargs}


def _check_callable(function: object, get_rng_state_tracker: object) -> None:
    if not callable(function):
        raise TypeError(
            "[checkpoint] expected function to be a module or another callable, got"
            f" {type(function).__name__}"
        )
    check_tracker("checkpoint", get_rng_state_tracker)


def _check_compiled(distributes: bool, tracked: bool) -> None:
    """Raise NotImplementedError for options that compiled code does not support."""
    if distributes:
        raise NotImplementedError(
            "[checkpoint] expected distribute_saved_activations=False under torch.compile, got "
            "True: what a graph keeps is the compiler's to choose; shard the arguments instead"
        )
    if tracked:
        raise NotImplementedError(
            "[checkpoint] expected get_rng_state_tracker=None under torch.compile, got a tracker: "
            "its states are Python's; torch's own random numbers are repeated without one"
        )


def _is_positional(args: tuple[Any, ...]) -> bool:
    """Whether arguments begin as in older versions: flag, tracker function, group."""
    return (
        len(args) > 3
        and isinstance(args[0], bool)
        and callable(args[1])
        and (args[2] is None or isinstance(args[2], dist.ProcessGroup))
    )


class _Function:
    """A function with modules of ours: the first call is recorded, later ones recompute it."""

    def __init__(self, function: Callable[..., Any], tracker: Any) -> None:
        stack = autocast_stack()
        self.function = function
        self.tracker = tracker
        self.states = None if tracker is None else snapshot(tracker.get_states())
        self.scope = stack.scope
        self.around = recompute_context(stack.recomputed, stack.regions)
        self.region: RecomputeRegion | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._first() if self.region is None else self._again(self.region):
            return self.function(*args, **kwargs)

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        stack = autocast_stack()
        self.region = RecomputeRegion()
        before = stack.recomputed, stack.regions
        attach_region(self.region)
        # A region within a recomputed one recomputes a part of it.
        stack.recomputed = self.around.recomputed
        stack.regions = (*self.around.open_regions, self.region)
        try:
            yield
        finally:
            stack.recomputed, stack.regions = before

    @contextlib.contextmanager
    def _again(self, region: RecomputeRegion) -> Iterator[None]:
        stack = autocast_stack()
        before = stack.recomputed, stack.regions
        stack.recomputed, stack.regions = region, ()
        region.restart()
        states = StatesOf(self.tracker, self.states) if self.tracker else contextlib.nullcontext()
        try:
            with stack.resumed(self.scope), states:
                try:
                    yield
                except torch_checkpoint.CheckpointError:  # other saved tensors than before
                    region.finish()  # raises a clearer error if the calls of layers differ
                    raise
                if graph_task() != -1:
                    region.finish()
        finally:
            stack.recomputed, stack.regions = before


@contextlib.contextmanager
def _distributed(group: Any) -> Iterator[None]:
    """Context in which autograd saves only this rank's part of the first tensor to be saved."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "[checkpoint] expected torch.distributed to be initialised with "
            "distribute_saved_activations=True, got a single process"
        )
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    first = ranks > 1

    def pack(x: torch.Tensor) -> Any:
        nonlocal first
        if not first:
            return x
        first = False
        part = -(-x.numel() // ranks)
        own = x.new_zeros(part)
        mine = x.reshape(-1)[part * rank : part * (rank + 1)]
        own[: mine.numel()].copy_(mine)
        return own, x.shape

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        own, shape = saved
        whole = own.new_empty(ranks * own.numel())
        gather_into(whole, own, group=group)
        return whole[: shape.numel()].view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
