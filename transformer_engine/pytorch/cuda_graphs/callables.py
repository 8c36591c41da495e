"""`make_graphed_callables`: forward and backward of parts of a model as CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch._torch_private import tree_leaves
from transformer_engine.pytorch.cuda_graphs.capture import Settings, capture_weights
from transformer_engine.pytorch.cuda_graphs.graphed import Graphed, state_restored
from transformer_engine.pytorch.cuda_graphs.hooks import capture_time_hooks_of
from transformer_engine.pytorch.cuda_graphs.order import CaptureOrder
from transformer_engine.pytorch.cuda_graphs.saved_scaling import capturing_graphs
from transformer_engine.pytorch.cuda_graphs.subject import Subject, not_graphed, replace_forward
from transformer_engine.pytorch.fp8.autocast import one_of, scope_of
from transformer_engine.pytorch.fp8.process_state import OUTSIDE, Scope, process_state

Function = Callable[..., Any]


def make_graphed_callables(
    modules: Function | Sequence[Function],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    fp8_enabled: bool | Sequence[bool] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    *,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: Sequence[int] | None = None,
    _reuse_graph_input_output_buffers: bool = False,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Mapping[str, Mapping[Any, Any]] | None] | None = None,
) -> Any:
    """Capture the forward and the backward of each callable as a CUDA graph.

    A call of a returned callable copies its tensors into the memory of the samples and replays the
    graph. Results equal those of eager mode, bit for bit, if attention runs the same backend: for
    graphs the backend is chosen by its GPU time only, because the host takes no part in a replay.
    Results are in memory of the graph, which the next call overwrites. The graphs record amaxes.
    Scales are updated outside of graphs: at the end of the outermost autocast (without one, at the
    end of the call) and at the end of the backward. Callables must be replayed in the order of
    their capture: forwards in the order of the list, backwards in reverse. Graphs keep the settings
    of modules (such as `eps` and `parallel_mode`) at the time of capture; later changes of settings
    have no effect on them.

    On a machine without CUDA, and for samples on the CPU, the callables are returned unchanged.

    Args:
        modules: a callable, or several. The `forward` of a module is replaced; in the other mode
            (training or evaluation) than at capture, the module runs eagerly. Other callables are
            not changed.
        sample_args: tuple of positional arguments, or one such tuple for each callable. Graphs
            keep these tensors as their inputs.
        num_warmup_iters: eager runs before the capture; their amaxes and gradients are discarded.
        allow_unused_input: allow inputs and parameters that get no gradient.
        sample_kwargs: keyword arguments, or one mapping for each callable.
        fp8_enabled: older name of `enabled`.
        fp8_calibrating: older name of `calibrating`.
        fp8_recipe: older name of `recipe`.
        fp8_group: older name of `amax_reduction_group`.
        fp8_weight_caching: older name of `cache_quantized_params`.
        enabled: run in FP8; or a sequence with one flag for each callable. The default is False.
        calibrating: see `autocast`.
        recipe: see `autocast`.
        amax_reduction_group: see `autocast`.
        cache_quantized_params: weights are cast only by calls with `is_first_microbatch=True`;
            every call must then pass `is_first_microbatch`. Containers whose `forward` does not
            take this keyword pass it on to modules inside that do.
        _order: for pipelines: chunks of callables in the order in which micro-batches run, `c`
            for the forward of chunk `c` (from 1) and `-c` for its backward. `sample_args` then has
            an entry for each callable and micro-batch (by chunk, micro-batch, layer), and functions
            come back in that order.
        _num_layers_per_chunk: number of callables in each chunk of `_order`; None for chunks of
            equal size.
        _reuse_graph_input_output_buffers: has no effect: samples may share memory if the order
            allows it, and the pool reuses the memory of results.
        pool: memory pool of the graphs, from `torch.cuda.graph_pool_handle()`.
        retain_graph_in_backward: capture the backward with `retain_graph=True`.
        clone_param_grads_on_return: gradients of parameters are copies; without it they are the
            graph's own memory, which the next backward overwrites.
        pre_warmup_hook: called before the eager runs.
        post_warmup_hook: called after the eager runs.
        capture_time_hooks: for each callable None, or a mapping of `forward_pre_hooks`,
            `forward_hooks`, `backward_pre_hooks` and `backward_hooks` to `{key: hook}`, with the
            arguments of torch's hooks of modules. They run in each warm-up and around each capture,
            and are not part of graphs. `forward_pre_hooks_with_kwargs` and
            `forward_hooks_with_kwargs` name the keys of hooks that take keyword arguments, too.

    Returns:
        The replacements of the callables: one, or a tuple. Each has a method `reset()`, which frees
        its graphs; later calls run eagerly.

    Raises:
        ValueError: arguments that contradict each other; inputs or parameters without a gradient.
        TypeError: samples that are not tuples of arguments.
        RuntimeError: a callable does something that no graph can hold.

    Example, on a GPU:

        layer = te.TransformerLayer(1024, 4096, 16, params_dtype=torch.bfloat16)
        x = torch.randn(512, 4, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer = te.make_graphed_callables(layer, (x,), fp8_enabled=True)
        with te.fp8_autocast(enabled=True):
            y = layer(x)
        y.sum().backward()
    """
    alone = callable(modules)
    functions: list[Function] = [modules] if alone else list(modules)  # type: ignore[list-item, arg-type]
    scopes = _scopes(
        len(functions),
        _given(fp8_enabled=fp8_enabled, enabled=enabled) or False,
        _given(fp8_calibrating=fp8_calibrating, calibrating=calibrating) or False,
        _given(fp8_recipe=fp8_recipe, recipe=recipe),
        _given(fp8_group=fp8_group, amax_reduction_group=amax_reduction_group),
    )
    caches = any(scope.enabled for scope in scopes) and bool(
        _given(fp8_weight_caching=fp8_weight_caching, cache_quantized_params=cache_quantized_params)
    )
    order = CaptureOrder(len(functions), _order, _num_layers_per_chunk)
    single = alone and _order is None
    samples = _samples(len(functions) * order.batches, sample_args, sample_kwargs, single)
    if not all(t.is_cuda for t in tree_leaves(samples) if isinstance(t, torch.Tensor)):
        _leave_as_they_are(functions, caches)
        return modules if alone else tuple(functions)
    _check_capturable(functions, _order)
    settings = Settings(
        OUTSIDE,
        num_warmup_iters,
        allow_unused_input,
        torch.cuda.graph_pool_handle() if pool is None else pool,
        torch.cuda.Stream(),
        caches,
        retain_graph_in_backward,
        clone_param_grads_on_return,
    )
    subjects = _subjects(functions, capture_time_hooks)
    of_each = [replace(settings, scope=scope) for scope in scopes]
    numbers = [order.function(i) for i in range(len(samples))]
    graphs = [
        Graphed(subjects[n], of_each[n], *sample)
        for n, sample in zip(numbers, samples, strict=True)
    ]
    _check_inspected(subjects)
    _warm_up(settings, subjects, graphs, pre_warmup_hook, post_warmup_hook)
    _capture(subjects, graphs, of_each, order)
    if _order is not None:
        return tuple(graphs)
    results = tuple(_replaced(graph) for graph in graphs)
    return results[0] if alone else results


_given = partial(one_of, "make_graphed_callables")


def _leave_as_they_are(functions: list[Function], caches: bool) -> None:
    warnings.warn(
        "[make_graphed_callables] CUDA graphs need samples on a CUDA device: the callables stay"
        " as they are",
        stacklevel=3,
    )
    for function in functions:
        not_graphed(function, caches)


def _scopes(
    count: int,
    enabled: bool | Sequence[bool],
    calibrating: bool,
    recipe: Recipe | None,
    group: Any,
) -> list[Scope]:
    """The scope of each callable."""
    flags = list(enabled) if isinstance(enabled, Sequence) else [enabled] * count
    if len(flags) != count:
        raise ValueError(
            f"[make_graphed_callables] expected enabled for each of {count} callable(s), got"
            f" {enabled}"
        )
    return [
        process_state().intern(scope_of(flag, calibrating, recipe, group))
        if flag or calibrating
        else OUTSIDE
        for flag in flags
    ]


Sample = tuple[tuple[Any, ...], dict[str, Any]]


def _samples(
    count: int,
    args: Sequence[Any],
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None,
    single: bool,
) -> list[Sample]:
    """The arguments of each graph. For a `single` callable they are passed without a list."""
    if single and not isinstance(args, tuple | list):
        raise TypeError(
            "[make_graphed_callables] expected sample_args=(x,), a tuple of arguments, got a"
            f" {type(args).__name__}"
        )
    every: list[Any] = [args] if single else list(args)
    if len(every) != count or not all(isinstance(one, tuple | list) for one in every):
        raise TypeError(
            f"[make_graphed_callables] expected sample_args to be {count} tuple(s) of arguments, "
            f"got {len(every)}: {[type(one).__name__ for one in every]}"
        )
    if kwargs is None:
        named: list[dict[str, Any]] = [{}] * count
    elif isinstance(kwargs, dict):
        named = [kwargs] * count if single else []
    else:
        named = list(kwargs)
    if len(named) != count:
        raise TypeError(
            f"[make_graphed_callables] expected sample_kwargs to be {count} mapping(s), got "
            f"{len(named) or 'one for all'}"
        )
    return [(tuple(a), dict(k)) for a, k in zip(every, named, strict=True)]


def _check_capturable(functions: list[Function], order: Sequence[int] | None) -> None:
    """Refuse callables and settings that cannot be captured correctly."""
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise ValueError(
            "[make_graphed_callables] expected torch.autocast(..., cache_enabled=False) around the "
            "capture, got a cache, whose casts would be missing in graphs"
        )
    if len(set(map(id, functions))) < len(functions) and order is None:
        raise ValueError("[make_graphed_callables] expected each callable once, got one twice")
    for i, function in enumerate(functions):
        if not isinstance(function, nn.Module):
            continue
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        if any(getattr(function, name) for name in hooks):
            raise ValueError(
                f"[make_graphed_callables] expected callable {i} ({_name(function)}) without hooks,"
                " got some: register them after the capture, or hand them to capture_time_hooks"
            )
        for module in function.modules():
            if getattr(module, "delay_wgrad_compute", False):
                raise ValueError(
                    f"[make_graphed_callables] expected delay_wgrad_compute=False in callable {i}, "
                    f"got True: a replay leaves nothing for backward_dw (layer {module.name})"
                )
        for name, buffer in function.named_buffers():
            if buffer.requires_grad:
                raise ValueError(
                    f"[make_graphed_callables] expected buffers without gradients, got {name} of "
                    f"callable {i} ({_name(function)})"
                )


def _subjects(functions: list[Function], hooks: Any) -> list[Subject]:
    places = [f"callable {i} ({_name(f)})" for i, f in enumerate(functions)]
    every = capture_time_hooks_of(hooks, places)
    return [Subject(*one) for one in zip(functions, places, every, strict=True)]


def _check_inspected(subjects: list[Subject]) -> None:
    """Refuse features of the debugger that run in Python, which replays would not call."""
    inspector = process_state().inspector
    if inspector is None:
        return
    layers = [name for s in subjects for module in s.ours for name in module.gemm_names]
    inspector.refuse(layers, "a CUDA graph capture", captured=True)


@capturing_graphs()
def _warm_up(
    settings: Settings,
    subjects: list[Subject],
    graphs: list[Graphed],
    before: Callable[[], Any] | None,
    after: Callable[[], Any] | None,
) -> None:
    torch.cuda.synchronize()
    with state_restored(subjects), torch.cuda.stream(settings.stream):
        if before is not None:
            before()
        for graph in graphs:
            graph.warm_up()
        if after is not None:
            after()
        torch.cuda.synchronize()
    inspector = process_state().inspector
    if inspector is not None:
        inspector.discard()


@capturing_graphs()
def _capture(
    subjects: list[Subject],
    graphs: list[Graphed],
    settings: Sequence[Settings],
    order: CaptureOrder,
) -> None:
    with _without_collector():
        for subject, own in zip(subjects, settings, strict=True):
            subject.record_states()
            if own.caches_weights and own.scope.enabled:
                capture_weights(subject, own)
        for graph, forward in order.steps():
            if forward:
                graphs[graph].capture_forward()
            else:
                graphs[graph].capture_backward()
    for subject in subjects:
        subject.drop_weights()
    # torch fills the seeds of a capture on its stream, and those of a replay on the current one.
    torch.cuda.synchronize()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Collect garbage now, and not during the capture, which would fail if a graph was freed.

    Graphed modules and their graphs are reference cycles, so the collector frees them.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _replaced(graph: Graphed) -> Function:
    """The module, whose forward now replays the graph; or the graph, in place of a function."""
    module, training = graph.subject.module, graph.subject.training
    if module is None:
        return graph

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (graph if module.training == training else graph.eager)(*args, **kwargs)

    replace_forward(module, forward, graph.reset)
    return module


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)
