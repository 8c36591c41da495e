"""What a `CustomRecipe` asks its function: for which tensor a quantizer is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_QUANTIZER = "no quantizer"
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class QuantizerRole:
    """A tensor of a GEMM, for which a `CustomRecipe` chooses the quantizer.

    Attributes:
        module_type: `"linear"`, or `"grouped_linear"` in `GroupedLinear`; empty in `ops.Quantize`.
        tensor_type: `"input"`, `"weight"` or `"grad_output"`.
        name: the GEMM as `gemm_report` names it: the name of the layer, with `.fc1` or `.fc2` in
            `LayerNormMLP`, and `.gemm_0`, `.gemm_1`, ... in `GroupedLinear`.

    >>> print(QuantizerRole("linear", "weight", "decoder.3.proj"))
    module_type=linear|tensor_type=weight|name=decoder.3.proj
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in vars(self).items() if value]
        return "|".join(parts) or "QuantizerRole()"


class Answers:
    """The quantizers that a function has chosen. It is asked once for each role.

    Attributes:
        number: a number that no other object has, for guards of graphs. It is a str, because
            graphs are not made for each value of an int.
    """

    def __init__(self, qfactory: Callable[[QuantizerRole], Any]) -> None:
        self._qfactory = qfactory
        self.number = str(next(_NUMBERS))
        self._made: dict[tuple[str, ...], Any] = {}

    def answer(self, *role: str) -> Any:
        """What the function has returned for a role, given by its fields."""
        if role not in self._made:
            self._made[role] = self._qfactory(QuantizerRole(*role))
        return self._made[role]

    def settings(self, *role: str) -> tuple[Any, ...] | None:
        """The answer as constants, see `Quantizer.module_settings`; None for None.

        For an object that is no quantizer: `NO_QUANTIZER` and its repr.
        """
        made = self.answer(*role)
        if made is None:
            return None
        settings = getattr(made, "module_settings", None)
        return (NO_QUANTIZER, repr(made)) if settings is None else settings()

    # Compiled code takes the result for a constant: Dynamo must not trace the user's function.
    settings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named(function: Callable[..., Any]) -> str:
    """The repr of a function, with an address or a hash that tells it from others."""
    shown = repr(function)
    return shown if " at 0x" in shown else f"{shown} at 0x{abs(hash(function)):x}"
