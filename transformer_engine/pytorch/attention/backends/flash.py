"""What the backends for flash-attn 2, 3 and 4 share.

The backward of a call is the version's own function, which is not public. If an installed package
has another function than is known here, torch differentiates the public function instead. Each
version is a separate package. This module looks for its distribution when it is imported; the
package itself is imported in its first call.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from transformer_engine.pytorch.attention.backends import local_graph
from transformer_engine.pytorch.attention.backends.backend import (
    GPU,
    HIGH_PRECISION,
    SOMETHING,
    Gradients,
    Needs,
    Problem,
    Requirement,
    Saved,
)
from transformer_engine.pytorch.attention.backends.strides import readable
from transformer_engine.pytorch.attention.backends.varlen import Side, VarlenKernel, varlen
from transformer_engine.pytorch.attention.core.call import Call
from transformer_engine.pytorch.attention.core.environment import environment, repeatable
from transformer_engine.pytorch.kernels.packed import empty_like_parts

# The tensors that a private function reads and writes; `_arguments` renames some of them.
_TENSORS = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")


@dataclass
class Package:
    """A version of flash-attn.

    Attributes:
        distribution: name of the package for pip.
        module: name of the module that has `flash_attn_func` and `flash_attn_varlen_func`.
        version: installed version; None if the package is not installed.
    """

    distribution: str
    module: str
    version: TorchVersion | None


def package(distribution: str, module: str) -> Package:
    """Look for a version of flash-attn, without importing it."""
    try:
        found: TorchVersion | None = TorchVersion(version(distribution))
    except PackageNotFoundError:
        found = None
    return Package(distribution, module, found)


class Options(NamedTuple):
    """Keyword arguments that all versions have, in each version's terms.

    Attributes:
        softmax_scale: factor on the scores.
        causal: keys behind the diagonal are hidden, and no others.
        window_size: `(left, right)`, -1 is no limit; the diagonal ends bottom-right.
        deterministic: gradients must repeat bit for bit.
    """

    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    deterministic: bool


def options(call: Call) -> Options:
    """The call's settings as flash-attn's arguments; `aligned` refuses calls without such ones."""
    limits = call.shape.rule if call.shape.band is None else call.shape.band
    left, right = limits.left, limits.right
    causal = (left, right) == (-1, 0)
    window = (-1, -1) if causal else (left, right)
    return Options(call.scale, causal, window, repeatable(environment()))


class Private(NamedTuple):
    """A version's backward function, which is not public: it writes gradients into given tensors.

    It is called by keyword, and only if it has all these parameters and requires no others.

    Attributes:
        whole: dotted name in the package, for whole sequences.
        packed: the same for packed sequences; `""` if there is none.
        statistics: keyword by which public functions return the log-sum-exp beside the result.
        names: its parameters for the log-sum-exp, and for whether the mask is causal.
        constants: arguments that are always the same.
    """

    whole: str
    packed: str
    statistics: str
    names: tuple[str, str]
    constants: dict[str, float]


class _Facts(NamedTuple):
    """What the backward depends on.

    Attributes:
        backward: see `Private`; None if autograd's graph is saved instead.
        tensors: names of the arguments that are tensors.
        settings: the other arguments.
        batch_second: the format is sbhd.
    """

    backward: Callable[..., Any] | None
    tensors: tuple[str, ...] = ()
    settings: dict[str, Any] | None = None
    batch_second: bool = False


class Kernels:
    """The two functions of a version's backend.

    The log-sum-exp is `[batch, heads, queries]`, or `[heads, tokens]` for packed sequences; there
    is none if the package's backward is not known.

    Args:
        source: the package to import at the first call.
        private: see `Private`.
    """

    def __init__(self, source: Package, private: Private) -> None:
        self.source = source
        self.private = private
        self._module: Any = None
        self._failure: str | None = None
        packed = VarlenKernel(self._packed_forward, self._gradients)
        self._forward_of_packed, self._backward_of_packed = varlen(packed)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        """See `backends/__init__.py`."""
        if call.shape.rule.type.padding:
            return self._forward_of_packed(query, key, value, call, needs)
        out, saved = self._run((query, key, value), {}, call, needs)
        batch_second = call.shape.qkv_format == "sbhd"
        return (out.transpose(0, 1) if batch_second else out).flatten(2), saved

    def backward(self, grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        """See `backends/__init__.py`."""
        shape = call.shape
        if shape.rule.type.padding:
            return self._backward_of_packed(grad, saved, call, needs)
        grad = grad.view(*grad.shape[:-1], shape.heads, shape.value_size)
        grad = grad.transpose(0, 1) if shape.qkv_format == "sbhd" else grad
        return self._gradients(grad, saved, call, needs)

    def _packed_forward(
        self,
        inputs: Sequence[torch.Tensor],
        query_side: Side,
        key_side: Side,
        call: Call,
        needs: Needs,
    ) -> tuple[torch.Tensor, Saved | None]:
        sequences = {
            "cu_seqlens_q": query_side.cu_seqlens,
            "cu_seqlens_k": key_side.cu_seqlens,
            "max_seqlen_q": query_side.longest,
            "max_seqlen_k": key_side.longest,
        }
        return self._run(inputs, sequences, call, needs)

    def _run(
        self, inputs: Sequence[torch.Tensor], sequences: dict[str, Any], call: Call, needs: Needs
    ) -> tuple[torch.Tensor, Saved | None]:
        """Call the package with queries, keys and values in the format of the call, or packed.

        `sequences` are further arguments for packed sequences.

        Returns:
            `[batch, sequence, heads, size]` or `[tokens, heads, size]`, and what is saved.
        """
        module, private = self.module, self.private
        function = module.flash_attn_varlen_func if sequences else module.flash_attn_func
        keywords = {**sequences, **self.keywords(options(call), call, inputs[0].device)}
        batch_second = not sequences and call.shape.qkv_format == "sbhd"
        inputs = tuple([readable(x) for x in inputs])
        views = batch_first(batch_second, *inputs)
        if not any(needs):
            return only_result(function(*views, **keywords)), None
        tensors = {name: x for name, x in keywords.items() if isinstance(x, torch.Tensor)}
        settings = {name: x for name, x in keywords.items() if name not in tensors}
        backward = self._backward_of(function, keywords) if self.knows(call) else None
        if backward is not None:
            out, lse, *_ = function(*views, **keywords, **{private.statistics: True})
            facts = _Facts(backward, tuple(tensors), settings, batch_second)
            return out, Saved(lse, (*inputs, out)).wrap(tuple(tensors.values()), facts)
        sink = () if call.sink.offset is None else (call.sink.offset,)

        def graph(*leaves: torch.Tensor) -> torch.Tensor:
            learned = dict(zip(("learnable_sink",), leaves[3:], strict=False))
            return only_result(function(*leaves[:3], **{**keywords, **learned}))

        wanted = (*needs[:3], needs.sink)[: 3 + len(sink)]
        out, graph_saved = local_graph.forward(graph, (*views, *sink), wanted)
        return out, graph_saved.wrap((), _Facts(None, batch_second=batch_second))

    def _gradients(self, grad: torch.Tensor, saved: Saved, call: Call, needs: Needs) -> Gradients:
        """The gradients of the inputs of `_run`, from the gradient of its result."""
        inner, tensors, facts = saved.unwrap()
        if facts.backward is None:
            wanted = (*needs[:3], needs.sink)[: len(inner.tensors) - 1]
            found = local_graph.backward(grad, inner, wanted)
            query, key, value = (
                x if x is None else x.transpose(0, 1) if facts.batch_second else x
                for x in found[:3]
            )
            return Gradients(query, key, value, None, *found[3:])
        *inputs, out = inner.tensors
        gradients = empty_like_parts(*inputs)
        q, k, v, dq, dk, dv = batch_first(facts.batch_second, *inputs, *gradients)
        keywords = {**facts.settings, **dict(zip(facts.tensors, tensors, strict=True))}
        written = {"dq": dq, "dk": dk, "dv": dv}
        read = {"q": q, "k": k, "v": v, "out": out, "dout": readable(grad)}
        facts.backward(**self._arguments(keywords, {**read, **written, "lse": saved.log_sum_exp}))
        return needs.pick(*gradients)

    def _backward_of(self, function: Any, keywords: dict[str, Any]) -> Callable[..., Any] | None:
        """The private function that is the backward of a public one; None if it is not known."""
        name = self.private.packed if "cu_seqlens_q" in keywords else self.private.whole
        backward: Any = self.module
        for part in name.split("."):
            backward = getattr(backward, part, None)
        arguments = frozenset(self._arguments(keywords, dict.fromkeys(_TENSORS)))
        if not name or not _accepts(backward, arguments):
            return None
        return backward if self.private.statistics in _parameters(function)[0] else None

    def _arguments(self, keywords: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the private function, from those of the public one."""
        arguments = {**keywords, **tensors, **self.private.constants}
        for ours, theirs in zip(("lse", "causal"), self.private.names, strict=True):
            arguments[theirs] = arguments.pop(ours)
        left, right = arguments.pop("window_size")
        return {**arguments, "window_size_left": left, "window_size_right": right}

    @property
    def module(self) -> Any:
        """The package, imported when first needed."""
        if self._module is None:
            self._module = import_module(self.source.module)
        return self._module

    @property
    def failure(self) -> str:
        """Why the package cannot be imported (a warning says it once); "" if it can."""
        if self._failure is None:
            self._failure = ""
            try:
                self.module  # noqa: B018
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
                name = self.source.distribution
                warnings.warn(
                    f"{name} cannot be imported, so other attention runs: {self._failure}",
                    stacklevel=2,
                )
        return self._failure

    def keywords(self, said: Options, call: Call, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the public functions; subclasses add those of their version."""
        return said._asdict()

    def knows(self, call: Call) -> bool:
        """Whether the private function, if there is one, can compute this call's backward."""
        return True


@lru_cache(maxsize=32)
def _accepts(function: Any, arguments: frozenset[str]) -> bool:
    """Whether a function has these parameters, and needs no other."""
    known, required = _parameters(function)
    return required <= arguments <= known


@lru_cache(maxsize=32)
def _parameters(function: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Names of all parameters, and of those without default; empty if they cannot be inspected."""
    operator = getattr(function, "_opoverload", None)  # of torch.library.custom_op
    if operator is not None:
        listed = operator._schema.arguments
        required = [x.name for x in listed if not x.has_default_value()]
        return frozenset(x.name for x in listed), frozenset(required)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), frozenset()
    required = [x.name for x in parameters if x.default is inspect.Parameter.empty]
    return frozenset(x.name for x in parameters), frozenset(required)


def batch_first(batch_second: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views `[batch, sequence, ...]` of tensors that may have their batch second."""
    return tuple([x.transpose(0, 1) for x in tensors]) if batch_second else tensors


def only_result(out: Any) -> torch.Tensor:
    """The result without the statistics that some versions return beside it."""
    return out[0] if isinstance(out, tuple | list) else out


def aligned(problem: Problem) -> bool:
    """Whether a diagonal that ends bottom-right, as flash-attn's does, is right for the mask."""
    if problem.rule.left < 0 and problem.rule.right < 0:
        return True
    return problem.rule.bottom_right or problem.alike


def importable(kernels: Kernels) -> Requirement:
    """Requires that the package can be imported: one that it needs may be missing.

    It must be the last requirement, because it imports the package.
    """
    name = kernels.source.distribution
    return Requirement(
        lambda problem, allowed: not kernels.failure,
        lambda problem: f"the installed {name} cannot be imported: {kernels.failure}",
    )


def requirements(source: Package, oldest: str) -> tuple[Requirement, ...]:
    """The requirements that all versions share."""
    name = source.distribution
    return (
        Requirement(
            lambda problem, allowed: allowed.flash,
            "switched off by NVTE_FLASH_ATTN=0",
        ),
        GPU,
        Requirement(
            lambda problem, allowed: source.version is not None,
            f"{name} is not installed; python -m pip install {name}",
        ),
        Requirement(
            lambda problem, allowed: source.version is None or source.version >= oldest,
            f"the installed {name} is older than {oldest}; python -m pip install -U {name}",
        ),
        Requirement(
            lambda problem, allowed: problem.dtype in (torch.float16, torch.bfloat16),
            "computes in float16 and bfloat16 only",
        ),
        HIGH_PRECISION,
        Requirement(
            lambda problem, allowed: not problem.rule.type.arbitrary,
            "takes no mask of one's own; use another attn_mask_type than 'arbitrary'",
        ),
        Requirement(
            lambda problem, allowed: aligned(problem),
            "its diagonal ends bottom-right; use a bottom_right mask type, or queries and keys of"
            " the same lengths (cu_seqlens_q and cu_seqlens_kv the same tensor)",
        ),
        Requirement(
            lambda problem, allowed: (
                not problem.padded_by_mask
                or (not problem.windowed and (problem.alike or not problem.rule.type.causal))
            ),
            "takes windows, and causal masks of keys with padding of their own, with lengths only;"
            " give cu_seqlens_q and cu_seqlens_kv instead of attention_mask",
        ),
        SOMETHING,
    )
