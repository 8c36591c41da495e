"""One function per op, for three callers: eager mode, `torch.compile`, and its fake tensors.

An op is written once: it allocates its outputs (which is also its shape inference) and then, if
`launch` is set, calls `_C`. `library_op` registers it with `torch.library` and returns a function
that calls the body directly in eager mode (the dispatcher costs 3 us a call) and
`torch.ops.te.<name>` while compiling.

Results may be None in the body. A library operator must return tensors, so there an absent result
travels as an empty bool tensor (no op of ours returns bools) and becomes None again on the way out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # 2.7
_LIBRARY = torch.library.Library("te", "DEF")


def _absent() -> torch.Tensor:
    return torch.empty(0, dtype=torch.bool)


def _to_library(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_absent() if t is None else t for t in result)
    return result


def _from_library(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return tuple(None if t.dtype is torch.bool else t for t in result)
    return result


@torch.compiler.assume_constant_result
def _exports_to_onnx() -> bool:
    if not is_exporting():
        return False
    onnx = sys.modules.get("torch.onnx")  # not imported with torch
    return onnx is not None and onnx.is_in_onnx_export()


def composite_op(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as `torch.ops.te.<name>`, and return that operator.

    Dynamo takes it as one operator and does not look inside. Where autograd is traced after that
    (and in eager mode) the function itself is called: it must be made of torch's operators and
    ours. Results may be views of arguments, as the schema says.
    """
    name = schema[: schema.index("(")]

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, body, "CompositeImplicitAutograd")
        operator: Callable[..., Any] = getattr(torch.ops.te, name)
        return operator

    return register


def _has_no_memory(first: Any) -> bool:
    return type(first) is FakeTensor or (isinstance(first, torch.Tensor) and first.is_meta)


def library_op(
    schema: str, *, writes_unseen: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.te.<name>` with this schema.

    Args:
        schema: `name(Tensor x, ...) -> (...)`, with `(a!)` on every tensor that is written to,
            except amaxes (docs/adr/0003): raising a maximum is idempotent and no graph reads it,
            while a declared write of forward state in backward cannot be compiled. The function
            takes the same arguments in the same order, and `launch: bool = True`.
        writes_unseen: what it is called for shows in no tensor that a graph knows: compilers must
            keep its calls, though nobody takes a result.
    """
    name = schema[: schema.index("(")]

    def register(body: Callable[P, R]) -> Callable[P, R]:
        def real(*args: Any, **kwargs: Any) -> Any:
            return _to_library(body(*args, **kwargs))

        def fake(*args: Any, **kwargs: Any) -> Any:
            return _to_library(body(*args, **kwargs, launch=False))  # type: ignore[arg-type]

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, real, "CPU")
        _LIBRARY.impl(name, real, "CUDA")
        torch.library.register_fake(f"te::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.te, name)
        if writes_unseen:
            torch.fx.node.has_side_effect(operator.default)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # Fake tensors also come where nothing is compiling yet, or ever, as those on meta do.
            if torch.compiler.is_compiling() or (args and _has_no_memory(args[0])):
                if _exports_to_onnx():
                    raise NotImplementedError(
                        f"[{name}] has no ONNX operator: export modules of transformer_engine"
                        " inside `with transformer_engine.pytorch.onnx_export(enabled=True)`"
                    )
                return _from_library(operator(*args, **kwargs))
            return body(*args, **kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = body.__doc__
        return call

    return register
