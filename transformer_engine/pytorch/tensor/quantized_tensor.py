"""`QuantizedTensor`: a tensor whose data is quantised, under a nominal high-precision dtype.

Any operation works: by default it runs on dequantised values and returns plain tensors; values that
it writes in place are quantised again. Operations that need only the codes (detach, clone, view,
moving between devices, copying) are in `handlers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn

from transformer_engine.pytorch._torch_private import no_torch_function, tree_leaves, tree_map
from transformer_engine.pytorch.dtypes import HIGH_PRECISION, DType
from transformer_engine.pytorch.fp8.casts.operands import Fp8Matrix
from transformer_engine.pytorch.fp8.casts.quantizers import Quantizer
from transformer_engine.pytorch.tensor.attributes import InitialValue, attributes_beside
from transformer_engine.pytorch.tensor.lists import parts_of_lists, written_by
from transformer_engine.pytorch.tensor.part_checks import check_parts, checked_attributes
from transformer_engine.pytorch.tensor.transparent import Dequantize
from transformer_engine.pytorch.tensor.without_storage import WithoutStorage
from transformer_engine.pytorch.tensor.writing import (
    alone,
    codes_around,
    overwrite,
    parts_for,
    shares_scale,
    warn_of_lost_alias,
    write,
    write_unless,
)

Handler = Callable[..., Any]
Parts = Sequence[torch.Tensor | None]


class QuantizedTensor(WithoutStorage):
    """Base of quantised tensors: a wrapper without storage of its own.

    A subclass consists of plain tensors, codes and scales, which it keeps under `part_names`, and
    of `facts` about them.
    """

    handlers: ClassVar[dict[Any, Handler]] = {}
    part_names: ClassVar[tuple[str, ...]] = ()
    fact_names: ClassVar[tuple[str, ...]] = ("dtype", "fp8_dtype", "quantizer")
    parts: tuple[torch.Tensor | None, ...]  # codes and scales; None for parts that are not there

    _fp8_dtype: DType
    _format: int  # FP8 type and scale layout as `_C` takes them: see `ScaleLayout.code`
    _quantizer: Quantizer | None
    _whole: torch.Tensor | None = None  # in a view: all codes of the tensor that it is a view of
    _room: Any = (0, lambda: None)  # while `fully_shard` cuts the tensor: see `shards.room_for`

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.part_names:
            cls.parts = property(attrgetter(*cls.part_names))  # type: ignore[assignment]

    @classmethod
    def assembled(cls, shape: torch.Size, parts: Parts, facts: Mapping[str, Any]) -> Any:
        """Make a tensor of `parts` and `facts`, such as those of another tensor."""
        raise NotImplementedError

    @classmethod
    def part_shapes(
        cls, shape: torch.Size, facts: Mapping[str, Any]
    ) -> Sequence[Sequence[tuple[int, ...]]]:
        """The shapes that each part of a tensor of this shape may have."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, Any]:
        """What `assembled` needs beside the parts."""
        return {"dtype": self.dtype, "fp8_dtype": self._fp8_dtype, "quantizer": self._quantizer}

    @property
    def scales(self) -> torch.Tensor:
        """fp32 scales with which a cast of the dequantised values gives the same codes."""
        raise NotImplementedError

    def side(self, columnwise: bool) -> Fp8Matrix | None:
        """One side as an operand of a GEMM; None where that side is missing."""
        raise NotImplementedError

    def viewed(self, shape: Sequence[int]) -> torch.Tensor:
        """`view`."""
        raise NotImplementedError

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised, in fp32, fp16 or bf16."""
        raise NotImplementedError

    def quantized(self, plain: torch.Tensor) -> Parts:
        """The parts that the quantizer makes of other values of this shape."""
        raise NotImplementedError

    def with_parts(self, parts: Parts, shape: torch.Size | None = None) -> Any:
        """A tensor of the same kind with other parts."""
        return self.assembled(self.shape if shape is None else shape, parts, self.facts)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A tensor of the same kind, whose parts are those of this one after `function`."""
        return self.with_parts([None if part is None else function(part) for part in self.parts])

    def adopt(self, parts: Parts) -> None:
        """Replace the parts that this tensor has by these, without a copy."""
        for name, own, other in zip(self.part_names, self.parts, parts, strict=True):
            if own is not None:
                setattr(self, name, other)

    def like(self, other: Any) -> bool:
        """Whether this tensor can take over the parts of another one as they are."""
        return (
            isinstance(other, type(self))
            and _same(self.facts, other.facts, but=("dtype", "quantizer"))
            and other.shape == self.shape
            and codes_around(self)
            is None  # a slice would bring its scale to the rest of the weight
            and (shares_scale(other) or not shares_scale(self))
            and all(
                own is None or there is not None
                for own, there in zip(self.parts, other.parts, strict=True)
            )
        )

    @property
    def data(self) -> torch.Tensor:
        """The same codes without autograd. Setting it replaces the values, or takes over codes."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise ValueError(
                f"[{type(self).__name__}] expected data of shape {tuple(self.shape)}, {self.dtype} "
                f"on {self.device}, got {tuple(value.shape)}, {value.dtype} on {value.device} "
                f"({self.label}); call to() of its own layer instead, and before that of a torch "
                "module that shares the weight"
            )
        if self.like(value):
            self.adopt(parts_for(self, value))  # type: ignore[arg-type]
        else:
            warn_of_lost_alias(self, value)
            self.quantize_(value)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (the nominal one where None).

        To autograd it is the identity.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return Dequantize.apply(self, dtype)
        return self.plain_values(dtype)

    def plain_values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dequantize` without autograd."""
        to = dtype or self.dtype
        if self.is_meta:
            return torch.empty(self.shape, dtype=to, device=self.device)
        return self.decoded(to if to in HIGH_PRECISION else torch.float32).to(to)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantise other values into this tensor.

        Args:
            tensor: of the same shape.
            noop_flag: one element, on the device: if it is not 0, the tensor is left unchanged.

        Raises:
            RuntimeError: the tensor was made without a quantizer.
            ValueError: the values have another shape.
        """
        if noop_flag is None:
            write([self], [tensor])
        else:
            write_unless(noop_flag, self, tensor)
        return self

    def get_usages(self) -> dict[str, bool]:
        """Which sides are there: `{"rowwise": ..., "columnwise": ...}`."""
        raise NotImplementedError

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make sides that are wanted and drop those that are not; None leaves one as it is.

        Raises:
            RuntimeError: a side that cannot be made from the other one; no side would be left.
        """
        raise NotImplementedError

    def get_data_tensors(self) -> Parts:
        """Codes and scales."""
        return self.parts

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert values to what the quantizer takes; raises the errors of `quantize_`."""
        name = type(self).__name__
        if self._quantizer is None:
            raise RuntimeError(
                f"[{name}] expected a quantizer to write with, got a tensor made without one, or a "
                "slice as an input of compiled code: cut and write it in the same code"
            )
        if tensor.shape != self.shape:
            raise ValueError(
                f"[{name}] expected values of shape {tuple(self.shape)}, got "
                f"{tuple(tensor.shape)} ({self.label})"
            )
        plain = tensor.plain_values() if isinstance(tensor, QuantizedTensor) else tensor.detach()
        to = plain.dtype if plain.dtype in HIGH_PRECISION else self.dtype
        return plain.to(self.device, to).contiguous().resolve_neg()

    def overwrite(self, parts: Parts) -> Any:
        """Copy other parts into the parts of this tensor; a part that is its own is not copied."""
        overwrite([(self, parts)])
        return self

    def drop_transpose(self) -> None:
        """Drop the cached transposed codes, because values change; here there are none."""

    @property
    def label(self) -> str:
        """What the tensor is, for messages: its class, or the parameter of which layer."""
        return getattr(self._quantizer, "label", "") or type(self).__name__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = type(self).__name__
        some = next(part for part in self.parts if part is not None)
        if self.is_meta or type(some) is not torch.Tensor:  # there is nothing to show
            return f"{name}(size={tuple(self.shape)}, dtype={self.dtype}, data={some})"
        return f"{name}({self.description()}, data={self.dequantize()})"

    def description(self) -> str:
        """What `repr` says beside the values."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """The plain tensors inside, and the rest (for torch.compile)."""
        named = zip(self.part_names, self.parts, strict=True)
        # Writes to a slice are refused: they would change the scale of codes that are not inside.
        sliced = {} if codes_around(self) is None else {"quantizer": None}
        return [name for name, part in named if part is not None], {**self.facts, **sliced}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any
    ) -> Any:
        """The inverse of `__tensor_flatten__`."""
        return cls.assembled(size, [inner.get(name) for name in cls.part_names], context)

    @classmethod
    def __metadata_guard__(cls, known: dict[str, Any], found: dict[str, Any]) -> bool:
        """Whether a graph compiled for one tensor serves another (quantizers differ by label)."""
        written = [facts["quantizer"] is not None for facts in (known, found)]
        return written[0] == written[1] and _same(known, found, but=("quantizer",))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy: Any
            if codes_around(self) is not None:
                copy = alone(self)
            else:
                parts = [None if part is None else part.clone() for part in self.parts]
                copy = self.with_parts(parts)
            if isinstance(self, nn.Parameter):
                copy = nn.Parameter(copy)
            own = attributes_beside(self, copy)
            vars(copy).update({k: deepcopy(v, memo) for k, v in own.items()})
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only quantizers of weights are saved: they hold nothing but settings.
        keeps = getattr(self._quantizer, "pickles", False)
        facts = {**self.facts, "fp8_dtype": int(self._fp8_dtype)}
        facts["quantizer"] = self._quantizer if keeps else None
        needs_grad = self.requires_grad if isinstance(self, nn.Parameter) else None
        plain = self.detach() if needs_grad is None else nn.Parameter(self.detach())
        own = attributes_beside(self, plain)
        saved = {name: own[name] for name in own if name not in InitialValue.METHODS}
        parts = self.parts if codes_around(self) is None else alone(self).parts
        arguments = (type(self), self.shape, parts, facts, needs_grad)
        return _rebuild, (*arguments, saved) if saved else arguments

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle on the codes where listed, else dequantise, run, and quantise what was written."""
        kwargs = kwargs or {}
        if func not in cls.handlers:  # torch leaves this to us for tensors made in inference mode
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.is_view and torch.is_inference_mode_enabled() is not args[0].is_inference():
            # Torch requires that a view and its base are both inference tensors, or neither is.
            with torch.inference_mode(args[0].is_inference()):
                return cls._dispatched(func, args, kwargs)
        return cls._dispatched(func, args, kwargs)

    @classmethod
    def _dispatched(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = cls.handlers.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.namespace == "c10d":  # a collective would read and write temporary values
            _refuse_communication(func, args)
        if func._schema.returns:
            return _on_values(func, args, kwargs)
        for part, named in parts_of_lists(QuantizedTensor, args, kwargs):
            _on_values(func, part, named)
        return None

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign some values, and quantise all of them again: views are copies here."""
        values = self.dequantize().clone()
        values[index] = value
        self.copy_(values)


def _same(facts: dict[str, Any], others: dict[str, Any], but: Sequence[str]) -> bool:
    return all(others[name] == fact for name, fact in facts.items() if name not in but)


def _rebuild(
    kind: type[QuantizedTensor],
    shape: torch.Size,
    parts: Parts,
    facts: dict[str, Any],
    needs_grad: bool | None,
    attributes: Mapping[str, Any] | None = None,  # in files of older versions
) -> torch.Tensor:
    """Make a tensor of what `torch.save` wrote; `needs_grad` is None if it was not a parameter.

    Raises:
        ValueError: a tensor of this kind and shape cannot consist of these parts.
    """
    if not (isinstance(kind, type) and issubclass(kind, QuantizedTensor) and kind.part_names):
        raise ValueError(f"[QuantizedTensor] expected a kind of quantised tensor, got {kind!r}")
    check_parts(kind, shape, parts, facts)
    tensor = kind.assembled(shape, parts, facts)
    own = checked_attributes(tensor, attributes or {})
    rebuilt = tensor if needs_grad is None else nn.Parameter(tensor, needs_grad)
    vars(rebuilt).update(own)
    initial = own.get("initial_value")
    if isinstance(initial, InitialValue):
        initial.attach(rebuilt)
    return rebuilt


torch.serialization.add_safe_globals([_rebuild])


def rowwise_of(x: QuantizedTensor) -> Fp8Matrix | None:
    """Row-wise codes and scales, not copied; None without row-wise codes.

    This is not a method, because torch.compile takes methods of tensors for operators.
    """
    # Compiled code would take the codes of an input as another input of the graph, and so miss what
    # the graph itself has written to them.
    whole = x.detach() if torch.compiler.is_compiling() else x
    codes, scales = [getattr(whole, name) for name in type(x).part_names[:2]]
    return None if codes is None else Fp8Matrix(codes, scales, x._format)


def _refuse_communication(func: Any, args: tuple[Any, ...]) -> None:
    for leaf in tree_leaves(args):
        if isinstance(leaf, QuantizedTensor):
            name = func._schema.name.removeprefix("c10d::")
            leaf._refuse(f"torch.distributed ({name})")


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on dequantised values, and quantise again what the operation has written."""
    plain: dict[int, torch.Tensor] = {}
    originals: dict[int, QuantizedTensor] = {}

    def values(leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedTensor):
            return leaf
        if id(leaf) not in plain:
            plain[id(leaf)] = found = leaf.plain_values()
            originals[id(found)] = leaf
        return plain[id(leaf)]

    result = func(*tree_map(values, args), **tree_map(values, kwargs))
    written = [*written_by(func, QuantizedTensor, args, kwargs)]
    write(written, [plain[id(tensor)] for tensor in written])
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)
