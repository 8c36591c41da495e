"""One function per op, for three callers: eager mode, `torch.compile`, and its fake tensors.

An op is written once: it allocates its outputs (which is also its shape inference) and then, if
`launch` is set, calls `_C`. `library_op` registers it with `torch.library` and returns a function
that calls the body directly in eager mode (the dispatcher costs 3 us a call) and
`torch.ops.te.<name>` while compiling.

Results may be None, in the body and in the operator: torch takes that as an undefined tensor, as
its own operators return for gradients that nobody wants.

Only the function has defaults. The operator has none, so that compiled code calls it without
keywords, each of which costs 0.4 us. Modules pass every argument, so that no graph depends on
defaults, which Dynamo would check at each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

import torch

from transformer_engine.pytorch._torch_private import (
    FakeTensor,
    constant_in_graphs,
    is_tracing,
    keep_calls,
    refuse_tracing,
)
from transformer_engine.pytorch.kernels.schema import Argument, schema_of

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("te", "DEF")


def _completed(
    arguments: tuple[Argument, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """All arguments of a call, including the defaults of those that were left out."""
    full = list(args)
    for kind, name, default in arguments[len(args) :]:
        full.append(kwargs[name] if name in kwargs else _constant(kind, default))
    return full


def _constant(kind: str, text: str) -> Any:
    """The value of a default, made from its text.

    Under dynamic shapes Dynamo turns numbers that Python objects hold into inputs of the graph.
    """
    if kind == "float":
        return float(text)
    words = {"None": None, "True": True, "False": False}
    return words[text] if text in words else int(text)


@constant_in_graphs
def is_exporting() -> bool:
    """Whether torch.export traces this call; Dynamo's own answer depends on its version."""
    return bool(torch.compiler.is_exporting())


@constant_in_graphs
def _exports_to_onnx() -> bool:
    if not is_exporting():
        return False
    onnx = sys.modules.get("torch.onnx")  # not imported with torch
    return onnx is not None and onnx.is_in_onnx_export()


def composite_op(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as `torch.ops.te.<name>`, and return that operator.

    Dynamo takes it as one operator and does not look inside. When AOTAutograd traces the graph
    afterwards, and in eager mode, the function itself is called: it must be made of torch's
    operators and ours. Results may be views of arguments, as the schema says.
    """
    name = schema[: schema.index("(")]

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, body, "CompositeImplicitAutograd")
        return getattr(torch.ops.te, name)

    return register


def _has_no_memory(first: Any) -> bool:
    if type(first) is list:
        first = first[0] if first else None
    return type(first) is FakeTensor or (isinstance(first, torch.Tensor) and first.is_meta)


def library_op(
    *, writes: Collection[str] = (), has_side_effects: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.te.<its name>`.

    Its annotations are the operator's schema. It also takes `launch: bool = True`, by name.

    Args:
        writes: the tensors that are written to, except amaxes (docs/adr/0003): raising a maximum
            is idempotent and no graph reads it, while a declared write of forward state in
            backward cannot be compiled.
        has_side_effects: compilers must keep its calls, although no tensor of the graph shows them.
    """

    def register(body: Callable[P, R]) -> Callable[P, R]:
        schema = schema_of(body, writes)
        name, arguments = schema.name, schema.arguments

        def fake(*args: Any) -> Any:
            return body(*args, launch=False)  # type: ignore[arg-type]

        _LIBRARY.define(str(schema))
        _LIBRARY.impl(name, body, "CPU")
        _LIBRARY.impl(name, body, "CUDA")
        torch.library.register_fake(f"te::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.te, name)
        if has_side_effects:
            keep_calls(operator.default)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # Fake tensors and meta tensors also come while nothing is being compiled.
            if torch.compiler.is_compiling() or (args and _has_no_memory(args[0])):
                if _exports_to_onnx():
                    raise NotImplementedError(
                        f"[{name}] has no ONNX operator: export modules of transformer_engine"
                        " inside `with transformer_engine.pytorch.onnx_export(enabled=True)`"
                    )
                if len(args) + len(kwargs) < len(arguments):
                    return operator(*_completed(arguments, args, kwargs))
                return operator(*args, **kwargs)
            if is_tracing():
                refuse_tracing(name)
            return body(*args, **kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = body.__doc__
        return call

    return register
