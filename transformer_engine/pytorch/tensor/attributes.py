"""What parameters carry beside their values: attributes of trainers and users, initial values."""

from __future__ import annotations

from typing import Any

import torch


class InitialValue:
    """The initial values of a parameter in high precision, on the CPU, until they are cleared."""

    METHODS = ("get_high_precision_init_val", "clear_high_precision_init_val")  # of the parameter

    def __init__(self, value: torch.Tensor | None = None) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return InitialValue, (self._value,)

    def get(self) -> torch.Tensor | None:
        """The values in high precision; None on meta, and once they were cleared."""
        return self._value

    def set(self, value: torch.Tensor) -> None:
        """Replace the values."""
        self._value = value

    def clear(self) -> None:
        """Free the values."""
        self._value = None

    def rows(self, start: int, stop: int) -> InitialValue:
        """The initial values of a piece of the parameter."""
        return InitialValue(None if self._value is None else self._value[start:stop].clone())

    def attach(self, parameter: Any) -> None:
        """Attach them to the parameter, where optimizers look."""
        parameter.initial_value = self
        parameter.get_high_precision_init_val = self.get
        parameter.clear_high_precision_init_val = self.clear


torch.serialization.add_safe_globals([InitialValue])


def attributes_beside(tensor: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    """The attributes of a tensor that another one lacks: those that trainers and users have set."""
    beside = {name: value for name, value in vars(tensor).items() if name not in vars(other)}
    return {name: value for name, value in beside.items() if not hasattr(type(tensor), name)}
