"""All private names of torch that we use, and what is done where torch lacks one.

Each is looked up once, when this file is imported. `MISSING` lists those that were not found; the
comment beside a name says, after "Without:", what happens then. All were seen in torch 2.8, in 2.11
to 2.15, and in 2.4 unless it says otherwise. Names are bound to torch's objects: no call overhead.

The base class of modes, the functions of nested values (`_pytree`) and `graph_task` have no
substitute: without them this import fails, and says which is missing. Not private for us are, and
stand where they are used: `torch._foreach_*` and `Tensor._make_wrapper_subclass`, which torch
documents, and attributes that subclasses of torch's classes have always relied on: `_version`,
`_base`, `_is_view`, `_schema`, `_parameters`, `_buffers`, `_modules` and the hooks of modules and
parameters. `tools/check_layering.py` refuses private names anywhere else.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, _pytree

from transformer_engine.pytorch.plain_tensors import PLAIN_TYPES

TorchDispatchMode = _python_dispatch.TorchDispatchMode
TreeSpec = _pytree.TreeSpec
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
F = TypeVar("F", bound=Callable[..., Any])
View = Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor]

MISSING: list[str] = []


def found(path: str, without: Any) -> Any:
    """What is at `path` ("module:name.name"); where there is nothing, `without`."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        MISSING.append(path)
        return without


_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled

# Not before 2.9. Without: the setting that this one has replaced.
_fp32_precision: Callable[[str, str], str] = found(
    "torch:_C._get_fp32_precision_getter",
    lambda backend, op: "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
)

graph_task = torch._C._current_graph_task_id  # of the backward that is running; -1: none
# Not in 2.4. Without: hooks on saved tensors cannot be seen, so layers run part by part, and in FP8
# they refuse torch's non-reentrant checkpoints, as where the records (below) are not found.
top_hooks: Callable[[bool], Any] = found(
    "torch:_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: (None, None)
)
# False within the forward of an autograd function. Without: taken as False, which is slower.
forward_grad_enabled: Callable[[], bool] = found("torch:_C._is_fwd_grad_enabled", lambda: False)
# The node whose backward runs. Without: recomputes of torch's reentrant checkpoints are missed.
running_node: Callable[[], Any] = found("torch:_C._current_autograd_node", lambda: None)
# Whether a node is part of the running backward; an error outside of one. Without: recomputes that
# start from a hook on a tensor are missed.
node_will_run: Any = found("torch:_C._will_engine_execute_node", lambda node: False)
# Without: taken as active, so that calls take the slower path, as with hooks, modes, forward
# differentiation or autocast.
transforms_active: Callable[[], bool] = found(
    "torch:_C._are_functorch_transforms_active", lambda: True
)
# Without: torch's public function, which does more checks.
is_tracing: Callable[[], bool] = found("torch:_C._is_tracing", torch.jit._trace.is_tracing)
# Without: calls inside of transforms fail in torch's words.
_functorch_interpreter: Callable[[], Any] = found(
    "torch:_C._functorch.peek_interpreter_stack", lambda: None
)
_is_batched: Callable[[torch.Tensor], bool] = found(  # by `is_grads_batched`
    "torch:_C._functorch.is_legacy_batchedtensor", lambda x: False
)
has_global_module_hooks: Callable[[], bool] = found(  # not in 2.4
    "torch.nn.modules.module:_has_any_global_hook", lambda: True
)
dispatch_modes: Callable[[], int] = found("torch:_C._len_torch_dispatch_stack", lambda: 1)
# Without: modes see what is made once, and selective checkpoints may refuse it in the recompute.
without_modes: Callable[[], contextlib._GeneratorContextManager[Any]] = found(
    "torch.utils._python_dispatch:_disable_current_modes",
    contextmanager(lambda: (None for _ in "1")),  # type: ignore[misc]
)
any_autocast_enabled: Callable[[], bool] = found("torch:_C._is_any_autocast_enabled", lambda: True)
_forward_ad: Any = forward_ad
if found("torch.autograd.forward_ad:_current_level", None) is None:
    _forward_ad = SimpleNamespace(_current_level=0)
# Without: memory and views come from torch's public functions, which is slower.
current_gpu: Callable[[], int] = found("torch:_C._cuda_getDevice", lambda: -1)  # in CUDA builds
empty_on_cpu: Allocator | None = found("torch:_C._dynamo.guards._empty_strided_cpu", None)
empty_on_gpu: Allocator | None = found("torch:_C._dynamo.guards._empty_strided_cuda", None)
# A view as of `as_strided`, in half the time; autograd does not know which tensor it is a view of.
part_of: View = found(
    "torch:_C._dynamo.guards._reinterpret_tensor", lambda *part: torch.as_strided(*part).detach()
)
# Kernels of attention by priority; not in 2.4. Without: torch's own order stays.
sdpa_order: Callable[[], list[int]] = found("torch:_C._get_sdp_priority_order", list)
set_sdpa_order: Callable[[list[int]], None] = found(
    "torch:_C._set_sdp_priority_order", lambda order: None
)
# Which attention kernel torch would run. Without: torch's function runs, with its autograd graph.
choose_sdpa: Any = found("torch:_fused_sdp_choice", None)
# Without: fake tensors outside of compiled code are taken for real ones.
FakeTensor: type = found("torch._subclasses.fake_tensor:FakeTensor", type("FakeTensor", (), {}))
fake_mode: Callable[[], Any] = found("torch._guards:detect_fake_mode", lambda: None)
no_torch_function: Any = found(
    "torch:_C._disabled_torch_function_impl", torch.nn.Parameter.__torch_function__
)
# Without: native code that asks a wrapper around other tensors where its memory is gets null.
refuse_data_ptr: Callable[[torch.Tensor], None] = found(
    "torch:_C._set_throw_on_mutable_data_ptr", lambda x: None
)
# Marks an operator whose calls graphs must keep. Without: calls with unused results may be dropped.
keep_calls: Callable[[Any], Any] = found("torch.fx.node:has_side_effect", lambda operator: operator)
# Without: a second backward is refused in torch's own words.
_delayed_error: Any = found("torch:_C._functions.DelayedError", None)
# Without: a context `torch.device("cpu")` looks like no context.
_DeviceContext: Any = found("torch.utils._device:DeviceContext", None)
_function_modes: Any = found("torch.overrides:_get_current_function_mode_stack", None)

# The store of `init_process_group`. Without: ranks that disagree are found in collectives only.
default_store: Callable[[], Any] = found(
    "torch.distributed.distributed_c10d:_get_default_store", lambda: None
)
# Collectives of compiled code; named so in torch's documentation of them. Without: a module that
# ranks share cannot be compiled.
functional_collectives: Any = found("torch.distributed._functional_collectives", None)
# Memory that GPUs of one host write into; torch documents it under this name. Without: NCCL moves
# all tensors.
symmetric_memory: Any = found("torch.distributed._symmetric_memory", None)


def allows_tf32() -> bool:
    """Whether fp32 products may run in TF32, as `torch.backends.cuda.matmul` says now.

    torch's own attributes take five times as long, and refuse an answer where programs have used
    both its old and its new settings.
    """
    return _fp32_precision("cuda", "matmul") == "tf32"


def other_caller_active() -> bool:
    """Whether functorch transforms this call, forward mode differentiates it, or it is traced."""
    return transforms_active() or _forward_ad._current_level >= 0 or is_tracing()


def refuse_tracing(layer: str) -> None:
    """Raise NotImplementedError where TorchScript traces a call, because it cannot see our kernels.

    Its graph would hold uninitialised memory, or the results of the traced call as constants.
    """
    if is_tracing():
        where = f" (layer {layer})" if layer else ""
        raise NotImplementedError(
            "[forward] expected a call outside of torch.jit.trace and torch.onnx.export("
            "dynamo=False), which cannot record transformer_engine, got one inside: use"
            " torch.export, or torch.onnx.export(dynamo=True) within te.onnx_export(enabled=True)"
            f"{where}"
        )


def refuse_scripting(module: torch.nn.Module) -> NoReturn:
    """The `__prepare_scriptable__` of modules, which `torch.jit.script` calls first."""
    kind = type(module).__name__
    raise NotImplementedError(
        "[torch.jit.script] expected a model without layers of transformer_engine, which it cannot"
        f" compile, got {kind}: use torch.compile or torch.export"
    )


def refuse_other_caller(layer: str, inputs: Sequence[Any]) -> None:
    """Raise NotImplementedError where functorch transforms a call, or where it is traced.

    Also where forward mode differentiates one of its inputs. Kernels read memory, which tensors of
    transforms do not have, and would drop tangents.
    """
    refuse_tracing(layer)
    batched = [isinstance(x, torch.Tensor) and _is_batched(x) for x in inputs]
    if _functorch_interpreter() is not None or any(batched):
        refuse_transforms(layer)
    if any(
        type(x) in PLAIN_TYPES and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        _refuse_inside("forward-mode differentiation (torch.autograd.forward_ad)", layer)


def refuse_transforms(layer: str) -> NoReturn:
    """Raise NotImplementedError because functorch transforms the call of a layer."""
    _refuse_inside("transforms of torch.func (grad, vjp, jvp, vmap, ...)", layer)


def _refuse_inside(what: str, layer: str) -> NoReturn:
    where = f" (layer {layer})" if layer else ""
    raise NotImplementedError(
        f"[forward] expected a call outside of {what}, which layers of transformer_engine do not"
        f" support, got one inside: use backward() or torch.autograd.grad without is_grads_batched"
        f"{where}"
    )


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The C++ `apply` that `function.apply` calls when no functorch transform is active.

    It skips checks for transforms and their tensors, which take up to 3 us a call.
    """
    bare = super(torch.autograd.Function, function)
    return getattr(bare, "apply", function.apply)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, through `bare_apply` wherever the result is the same."""
    bare = bare_apply(function)

    def apply(*args: Any) -> Any:
        if _is_compiling() or transforms_active():
            return function.apply(*args)
        return bare(*args)

    return apply


def release_saved_tensors(ctx: Any) -> None:
    """Drop a node's references to saved tensors, once its backward has read `ctx.saved_tensors`.

    Each tensor is then freed as soon as the backward drops it, not when the backward ends. A
    retained graph keeps them. Without `maybe_clear_saved_tensors` they are freed at the end.
    """
    release = getattr(ctx, "maybe_clear_saved_tensors", None)
    if release is not None:
        release()


def not_differentiable(gradients: Sequence[Any], layer: str) -> tuple[Any, ...]:
    """Gradients for a graph of the backward (`create_graph=True`), whose own backward is an error.

    They were computed without autograd, and are None for inputs that have none.
    """
    where = f" (layer {layer})" if layer else ""
    message = (
        "[backward] expected one backward of layers of transformer_engine, got a second one through"
        f" their gradients: gradients of gradients are not supported{where}"
    )
    if _delayed_error is None:
        return tuple(g if g is None else g.detach() for g in gradients)
    error = _delayed_error(message.encode(), len(gradients))
    found = error(*[g if g is None else g.detach().requires_grad_() for g in gradients])
    return found if isinstance(found, tuple) else (found,)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's `once_differentiable`, which takes 5 us and is skipped where autograd is off."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        return (guarded if _is_grad_enabled() else backward)(ctx, *gradients)

    return once


def without_side_effect_checks(function: Callable[[], Any]) -> Any:
    """Call a function; Dynamo, which traces a checkpoint, allows it to change Python's state.

    Dynamo is slow to import, but is loaded while it traces. Not in 2.4. Without: it refuses.
    """
    name = "_disable_side_effect_safety_checks_for_current_subtracer"
    unchecked = getattr(torch._dynamo.utils, name, None)
    return function() if unchecked is None else unchecked(function)


def constant_in_graphs(function: F) -> F:
    """Decorator: compiled code uses the result that the function had during tracing as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler (a second).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def real_object(x: Any) -> Any:
    """The object itself: Dynamo of torch 2.13 calls functions with stand-ins of process groups."""
    return getattr(x, "real_obj", x)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` is true.

    While AOTAutograd traces, torch sets it since 2.13; older releases only while Dynamo traces.
    """
    before = getattr(torch.compiler, "_is_compiling_flag", False)
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def keep_address(x: torch.Tensor) -> None:
    """Mark a tensor so that CUDA graphs of torch.compile read and write its memory, not a copy.

    This is what `torch._dynamo.mark_static_address` does, which is slow to import.
    """
    x._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a storage."""
    return memory_of(a) == memory_of(b)


def is_number(size: Any) -> bool:
    """Whether a size is a number, not a symbol; without `SymNode.maybe_as_int`: an int."""
    if isinstance(size, int):
        return True
    known = getattr(getattr(size, "node", None), "maybe_as_int", None)
    return known is not None and known() is not None


def memory_of(x: torch.Tensor) -> int:
    """A number that tensors share if they share a storage; without `_cdata`: its address."""
    storage = x.untyped_storage()
    return storage._cdata if hasattr(storage, "_cdata") else storage.data_ptr()


def default_device_is_set() -> bool:
    """Whether a `torch.device` is entered or set as default."""
    if _DeviceContext is None or _function_modes is None:
        return torch.get_default_device().type != "cpu"
    return any(isinstance(mode, _DeviceContext) for mode in _function_modes())


# What torch calls its records of a checkpoint in the closures of its hooks on saved tensors.
# Without: layers that ran in FP8 refuse to run again, and name `te.checkpoint` (see `regions`).
_RECORDS = {"_checkpoint_hook": "frame", "_recomputation_hook": "target_frame_ref"}
for _hook, _record in _RECORDS.items():
    _code = found(f"torch.utils.checkpoint:{_hook}.__init__.__code__", None)
    if _record not in getattr(_code, "co_cellvars", ()):
        MISSING.append(f"torch.utils.checkpoint:{_hook}.{_record}")


def checkpoint_of_hooks() -> tuple[Any, Any]:
    """Torch's record of its innermost non-reentrant checkpoint, as (first run's, recompute's)."""
    cells: dict[str, Any] = {}
    for hook in top_hooks(True) or ():
        function: Any = getattr(hook, "_torchdynamo_orig_callable", hook)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells.update(zip(names, getattr(function, "__closure__", None) or (), strict=True))
    first, again = _RECORDS.values()
    if first in cells:
        return cells[first].cell_contents, None
    if again in cells:
        return None, cells[again].cell_contents()
    if {"storage", "weak_holder_list"} <= cells.keys():  # DeepSpeed's record, in both runs
        storage = cells["storage"].cell_contents
        return (storage, None) if "Holder" in cells else (None, storage)
    return None, None


def functions_in_forward() -> Iterator[Any]:
    """Contexts of the autograd functions whose forward is running, innermost first.

    Torch has no function for this: the Python frames are searched, for those with a backward.
    """
    if forward_grad_enabled() or torch.is_inference_mode_enabled():
        return  # within the forward of a function it is off
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_name in ("forward", "backward"):
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, torch.autograd.function.BackwardCFunction):
                if code.co_name == "backward":
                    return  # the first forward of what is outside has found it
                if context.next_functions:
                    yield context
        frame = frame.f_back  # type: ignore[assignment]


def group_timeout(group: Any) -> Any:
    """The `timedelta` that a rank waits for others; without private names, that of the store."""
    own: Any = torch.distributed.group.WORLD if group is None else group
    device = torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
    with contextlib.suppress(AttributeError, RuntimeError):
        return own._get_backend(device).options._timeout
    return getattr(default_store(), "timeout", timedelta(minutes=10))
