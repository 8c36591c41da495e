"""Settings: attributes that decide how a chain is built, and may be set at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.plan import PlanCache


class BuildsChain:
    """Base of modules that build their chain from settings."""

    chain: Chain
    _plans: PlanCache

    def _build_chain(self) -> Chain:
        """The chain for the current settings."""
        raise NotImplementedError

    def rebuild_chain(self) -> None:
        """Build the chain anew, because a setting has changed. Cached weights stay.

        Layers around this module, and compiled code, see the new chain; a CUDA graph that was
        captured does not.
        """
        before = self.__dict__.get("chain")
        if before is not None:  # else the constructor runs
            self.chain = self._build_chain()
            self.chain.take_over(before)
            self._plans = PlanCache()  # copies of the module may share the one before

    def drop_plans(self) -> None:
        """Drop all plans and recordings, because something that they point to has changed.

        That is: the name, a registered parameter, dtype or device (`_apply`), the chain, or scaling
        state that was replaced, loaded or moved to another scaling group.
        """
        self._plans.clear()


class _Setting:
    """The module has the value in its dict, as any other attribute."""

    def __init__(self, checked: Callable[[Any, Any], Any] | None) -> None:
        self._checked = checked
        self._name = ""

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self._name]
        except KeyError:  # torch then looks among parameters and modules
            raise AttributeError(self._name) from None

    def __delete__(self, module: Any) -> None:
        del module.__dict__[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        own, name = module.__dict__, self._name
        if self._checked is not None:
            value = self._checked(module, value)
        before = own.get(name, self)
        if value == before:
            return
        own[name] = value
        if before is self:  # the constructor sets it
            return
        try:
            module.rebuild_chain()
        except Exception:  # no chain can be built
            own[name] = before
            raise


def setting(checked: Callable[[Any, Any], Any] | None = None) -> Any:
    """An attribute that decides how the chain of a module is built.

    Args:
        checked: called with the module and a value that is set; returns what the module has then,
            or raises.
    """
    return _Setting(checked)


def own_settings(module: nn.Module) -> dict[str, Any]:
    """The settings of a module by name, without those that say how ranks share it."""
    kinds = type(module).__mro__
    names = {n for kind in kinds for n, one in vars(kind).items() if isinstance(one, _Setting)}
    return {name: getattr(module, name) for name in names - {"parallel_mode", "sequence_parallel"}}
