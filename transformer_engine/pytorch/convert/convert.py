"""`convert`: replaces the layers of a torch model by ours, and back, and reports what it did."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from transformer_engine.pytorch.convert.convertible import (
    TO_TE,
    TO_TORCH,
    Counterpart,
    NormInNext,
    build_norm_linear,
    foreign_attributes,
    holds_other_matrix,
    label,
    torch_norm_of,
    unlike_its_class,
)
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear

Patterns = str | Sequence[str] | None


class Replaced(NamedTuple):
    """A layer that was replaced: its path, and the names of its classes."""

    path: str
    before: str
    after: str


class Left(NamedTuple):
    """A layer that was left as it is, and why."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did; `print` shows it as a table.

    Attributes:
        replaced: layers that are now of another class.
        left: layers of a convertible kind that stayed, with the reason.
        notes: further remarks for the reader.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}, left {len(self.left)}"]
        lines += _table(("replaced", "was", "is"), self.replaced)
        lines += _table(("left", "kind", "why"), self.left)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    cells = [zip(row, widths, strict=True) for row in (titles, *rows)]
    return ["", *("  ".join(text.ljust(width) for text, width in row).rstrip() for row in cells)]


def convert(
    model: nn.Module,
    include: Patterns = None,
    exclude: Patterns = None,
    *,
    to: str = "te",
    fuse: bool = True,
) -> ConversionReport:
    """Replace `nn.Linear`, `nn.LayerNorm` and `nn.RMSNorm` by ours, in place.

    Parameters stay the same tensors, so optimizers, tied names and state dict keys stay valid. (Our
    layers add a key `_extra_state`, which may be missing in a state dict that is loaded.) In an
    `nn.Sequential`, a norm and the Linear after it become one `LayerNormLinear` at the Linear's
    place. The norm's parameters are then `<linear>.layer_norm_weight` and
    `<linear>.layer_norm_bias`. This is correct if the container runs as a whole. If other code
    calls members of the container, or needs the old keys, give `fuse=False`.

    Layers that differ from their class (subclasses, hooks, parametrizations, tied weights, ...), or
    whose sizes FP8 does not support, stay, and the report says why.

    Args:
        model: the model; it must hold the layers, not be one.
        include: regular expressions, searched in the attribute path (`encoder.layers.0.linear1`);
            a layer is replaced only if one of them matches. None: all layers.
        exclude: regular expressions; a layer stays if one of them matches.
        to: `"te"`, or `"torch"` to replace ours by torch's again.
        fuse: make one layer of a norm and a Linear that follow each other in an `nn.Sequential`.

    Returns:
        What was replaced and what was left, printable as a table.

    Raises:
        ValueError: the model itself is such a layer, `to` is unknown, or a pattern is not a regular
            expression.
        TypeError: the model is not an `nn.Module`.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    >>> print(convert(model))
    replaced 1, left 1
    <BLANKLINE>
    replaced  was        is
    0         nn.Linear  te.Linear
    <BLANKLINE>
    left  kind       why
    2     nn.Linear  sizes 64 -> 10: FP8 needs multiples of 16
    >>> len(convert(model, to="torch").replaced)
    1
    """
    if to not in ("te", "torch"):
        raise ValueError(f"[convert] expected to='te' or to='torch', got {to!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"[convert] expected an nn.Module, got {type(model).__name__}")
    table = TO_TE if to == "te" else TO_TORCH
    if isinstance(model, tuple(table)):
        raise ValueError(
            f"[convert] expected a model that holds layers, got a {type(model).__name__} itself: "
            "nothing holds it, so it cannot be replaced in place"
        )
    plan = _Plan(model, table, _Selection(include, exclude))
    if to == "te":
        plan.fuse_norms(fuse)
    else:
        plan.split_norms()
    return plan.carry_out()


class _Selection:
    """Which paths the caller chose; and `useless`, the patterns that matched no path."""

    def __init__(self, include: Patterns, exclude: Patterns) -> None:
        self.include = None if include is None else _compiled(include, "include")
        self.exclude = _compiled(exclude or (), "exclude")
        self.useless = {*(self.include or ()), *self.exclude}

    def refusal(self, path: str) -> str | None:
        """Why a path is not chosen; None where it is."""
        wanted = [p for p in self.include or () if p.search(path)]
        unwanted = [p for p in self.exclude if p.search(path)]
        self.useless.difference_update(wanted, unwanted)
        if unwanted:
            return f"excluded by {unwanted[0].pattern!r}"
        return "not included" if self.include is not None and not wanted else None


def _compiled(patterns: str | Sequence[str], argument: str) -> list[re.Pattern[str]]:
    made = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            made.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(
                f"[convert] expected a regular expression for {argument}, got {pattern!r}: {error}"
            ) from error
    return made


@dataclass
class _Layer:
    """A layer of the model, all its paths in the model, and its replacement."""

    module: nn.Module
    paths: list[str]
    counterpart: Counterpart
    kind: type[nn.Module]
    reason: str | None = None
    made: nn.Module | None = None
    parameters: dict[str, nn.Parameter | None] = field(default_factory=dict)


class _Plan:
    """All decisions first, then all replacements: an error leaves the model as it was."""

    def __init__(
        self,
        model: nn.Module,
        table: dict[type[nn.Module], Counterpart],
        selection: _Selection,
    ) -> None:
        self.model = model
        self.table = table
        self.selection = selection
        self.layers: dict[int, _Layer] = {}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in self.modules.items():
            kind = next((kind for kind in table if isinstance(module, kind)), None)
            if kind is not None:
                new = _Layer(module, [], table[kind], kind, parameters=dict(module._parameters))
                self.layers.setdefault(id(module), new).paths.append(path)
        self.tied = self._tied()
        for layer in self.layers.values():
            layer.reason = self._refusal(layer)

    def _tied(self) -> dict[int, set[str]]:
        """The paths of each parameter that several modules hold, by the parameter's id."""
        holders: dict[int, dict[int, str]] = {}
        for path, module in self.modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{path}.{name}" if path else name
                    holders.setdefault(id(parameter), {}).setdefault(id(module), full)
        return {key: set(found.values()) for key, found in holders.items() if len(found) > 1}

    def _refusal(self, layer: _Layer) -> str | None:
        module, kind = layer.module, layer.kind
        reason = next(filter(None, map(self.selection.refusal, layer.paths)), None)
        reason = reason or self._owner(layer.paths) or unlike_its_class(module, kind)
        if reason is not None:
            return reason
        for parameter in module._parameters.values():
            if id(parameter) in self.tied:
                own = {f"{path}.{name}" for path in layer.paths for name in module._parameters}
                others = sorted(self.tied[id(parameter)] - own)
                return f"its parameter is tied to {', '.join(others)}"
        clashes = foreign_attributes(module, layer.counterpart.target)[1]
        if clashes:
            return f"attributes that were set on it mean something else there: {clashes}"
        return layer.counterpart.refusal(module)

    def _owner(self, paths: list[str]) -> str | None:
        """The reason to leave a part of one of our modules, which depends on the part's class."""
        for path in paths:
            names = path.split(".")
            for depth in range(len(names)):
                owner = self.modules[".".join(names[:depth])]
                if type(owner).__module__.startswith("transformer_engine."):
                    return f"it is a part of {label(type(owner))}"
        return None

    def _pairs(self) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
        """Neighbours (path, module, path, module) in every `nn.Sequential`."""
        for path, module in self.modules.items():
            if type(module) is nn.Sequential and "forward" not in vars(module):
                below = f"{path}." if path else ""
                children = [(below + name, child) for name, child in module._modules.items()]
                for first, second in pairwise(children):
                    yield *first, *second

    def fuse_norms(self, wanted: bool) -> None:
        """A norm and the Linear after it become one layer at the Linear's place."""
        for _, first, path, second in self._pairs() if wanted else ():
            norm, linear = self.layers.get(id(first)), self.layers.get(id(second))
            if norm is None or linear is None or not _fusible(norm, linear):
                continue
            linear.made = build_norm_linear(norm.module, linear.module, path)
            of_norm = norm.module._parameters.items()
            linear.parameters |= {f"layer_norm_{name}": one for name, one in of_norm}
            norm.made, norm.parameters = NormInNext(), {}

    def split_norms(self) -> None:
        """A `LayerNormLinear` that `fuse_norms` made becomes two layers again."""
        places = {id(second): (path, first) for path, first, _, second in self._pairs()}
        for layer in list(self.layers.values()):
            if layer.kind is not LayerNormLinear or layer.reason is not None:
                continue
            path, before = places.get(id(layer.module), ("", None))
            if type(before) is not NormInNext:
                layer.reason = "it has no one counterpart in torch"
                continue
            norm = torch_norm_of(layer.module)
            of_norm = {
                name: layer.parameters.pop(f"layer_norm_{name}", None) for name in norm._parameters
            }
            added = _Layer(before, [path], layer.counterpart, NormInNext, None, norm, of_norm)
            self.layers[id(before)] = added

    def carry_out(self) -> ConversionReport:
        """Build the missing replacements, put all of them into the model, and report."""
        chosen = [layer for layer in self.layers.values() if layer.reason is None]
        for layer in chosen:
            layer.made = _furnish(layer)
        for layer in chosen:
            for path in layer.paths:
                parent, _, name = path.rpartition(".")
                self.modules[parent]._modules[name] = layer.made
        order = {path: i for i, path in enumerate(self.modules)}
        replaced = [
            Replaced(path, label(layer.kind), label(type(layer.made)))  # type: ignore[arg-type]
            for layer in chosen
            for path in layer.paths
        ]
        left = [
            Left(path, label(layer.kind), layer.reason)
            for layer in self.layers.values()
            if layer.reason is not None
            for path in layer.paths
        ]
        return ConversionReport(
            tuple(sorted(replaced, key=lambda one: order[one.path])),
            tuple(sorted(left, key=lambda one: order[one.path])),
            tuple(self._notes(chosen)),
        )

    def _notes(self, chosen: list[_Layer]) -> Iterator[str]:
        if self.table is TO_TE:
            yield from self._other_matrices()
        for pattern in sorted(p.pattern for p in self.selection.useless):
            yield f"the pattern {pattern!r} is found in the path of no layer"
        paths = [path for layer in chosen if layer.kind in TO_TE for path in layer.paths]
        for path, module in self.modules.items():
            below = f"{path}." if path else ""
            if isinstance(module, nn.TransformerEncoderLayer) and any(
                changed.startswith(below) for changed in paths
            ):
                yield (
                    f"{path or 'the model'}: in eval mode without gradients torch reads the weights"
                    " of nn.TransformerEncoderLayer itself, past the replaced layers; "
                    "torch.backends.mha.set_fastpath_enabled(False) makes it call them"
                )
                return

    def _other_matrices(self) -> Iterator[str]:
        """Layers that no class of the table describes, such as `Conv1D` of transformers."""
        found: dict[str, list[str]] = {}
        for path, module in self.modules.items():
            if holds_other_matrix(module) and self.selection.refusal(path) is None:
                found.setdefault(type(module).__name__, []).append(path)
        for kind, paths in found.items():
            yield (
                f"{kind} stays ({len(paths)} of them, the first is {paths[0] or 'the model'}): it"
                " has a matrix as weight, but is no nn.Linear"
            )


def _fusible(norm: _Layer, linear: _Layer) -> bool:
    """Whether a norm and the Linear after it can become one layer.

    Both must be convertible and stand at one place each; sizes, dtypes and devices must match.
    """
    if norm.reason is not None or linear.reason is not None or linear.kind is not nn.Linear:
        return False
    if norm.kind is nn.Linear or len(norm.paths) > 1 or len(linear.paths) > 1:
        return False
    first: Any = norm.module
    second: Any = linear.module
    return (
        tuple(first.normalized_shape) == (second.in_features,)
        and (first.weight.dtype, first.weight.device) == (second.weight.dtype, second.weight.device)
        and first.training == second.training
        and not foreign_attributes(second, LayerNormLinear)[1]
    )


def _furnish(layer: _Layer) -> nn.Module:
    """The replacement of a layer, with the layer's parameters, mode and user-set attributes."""
    made = layer.made or layer.counterpart.build(layer.module, layer.paths[0])
    for name, parameter in layer.parameters.items():
        if parameter is not None:
            made._parameters[name] = parameter
    vars(made).update(foreign_attributes(layer.module, type(made))[0])
    return made.train(layer.module.training)
