"""Settings: attributes that decide how a chain is built, and may be set at any time.

A `Setting` is a descriptor in the class. Setting another value checks it and builds the chain of
the module anew, so that the value takes effect in the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from transformer_engine._flags import checked_flag
from transformer_engine.pytorch.chain.chain import Chain
from transformer_engine.pytorch.chain.plan import PlanCache
from transformer_engine.pytorch.module.arguments import in_layer


class HasSettings:
    """Base of modules with settings."""

    def is_built(self) -> bool:
        """Whether the constructor has built the chain, or the parts that have chains."""
        return "chain" in self.__dict__

    def rebuild_chain(self) -> None:
        """Act on a setting that has changed."""
        raise NotImplementedError

    def fixed_settings(self) -> tuple[str, ...]:
        """Names of attributes that only the constructor may set."""
        return ()

    def __setattr__(self, name: str, value: Any) -> None:
        """See `torch.nn.Module`. Raises where the value would have no effect.

        Subclasses with their own constructor are not checked, because they may use the names for
        other attributes.
        """
        if type(self).__init__.__module__.startswith("transformer_engine."):
            self._refuse_change(name, value)
        if isinstance(value, nn.Module | nn.Parameter):  # which torch registers
            one = getattr(type(self), name, None)
            if isinstance(one, Setting):
                self._replace_setting(one, name, value)
        super().__setattr__(name, value)

    def _refuse_change(self, name: str, value: Any) -> None:
        if not self.is_built() or name not in self.fixed_settings():
            return
        before = getattr(self, name)
        if value != before:
            raise ValueError(
                f"[{type(self).__name__}] expected {name}={before!r} to stay, as the constructor"
                f" builds the layer for it, got {value!r}{_in_layer_of(self)}"
            )

    def _replace_setting(self, one: Setting, name: str, value: object) -> None:
        """Remove the setting, so that torch finds what it registers, in classes of users alone.

        In classes of this package, raise TypeError.
        """
        if type(self).__module__.startswith("transformer_engine."):
            raise TypeError(
                f"[{type(self).__name__}] expected {name} to be no parameter and no module, got"
                f" {type(value).__name__}{_in_layer_of(self)}"
            )
        self.__dict__.pop(one.key, None)


class BuildsChain(HasSettings):
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


def _in_layer_of(module: Any) -> str:
    return in_layer(getattr(module, "name", None))


class Setting:
    """A descriptor that keeps its value in the `__dict__` of the module, as `_setting_<name>`.

    The key is not the name of the attribute: with that torch 2.11 would never end tracing a read.
    """

    def __init__(
        self,
        checked: Callable[[Any, Any], Any] | None,
        flag: bool,
        apply: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._checked, self._flag, self._apply = checked, flag, apply
        self._name = self.key = ""

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        self._name, self.key = name, f"_setting_{name}"

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.key]
        except KeyError:  # torch then looks among parameters and modules
            raise AttributeError(self._name) from None

    def __delete__(self, module: Any) -> None:
        del module.__dict__[self.key]

    def __set__(self, module: Any, value: Any) -> None:
        own, key = module.__dict__, self.key
        if self._flag:
            value = checked_flag(type(module).__name__, self._name, value, _in_layer_of(module))
        if self._checked is not None:
            value = self._checked(module, value)
        before = own.get(key, self)
        if value == before and self._apply is None:
            return
        own[key] = value
        if not module.is_built():
            return
        try:
            if self._apply is None:
                module.rebuild_chain()
            else:
                self._apply(module, value)
        except Exception:  # no chain can be built with this value
            own[key] = before
            if before is self:
                del own[key]
            raise


def setting(
    checked: Callable[[Any, Any], Any] | None = None,
    apply: Callable[[Any, Any], None] | None = None,
) -> Any:
    """An attribute that decides how the chain of a module is built.

    Args:
        checked: called with the module and a new value; returns the value to store, or raises.
        apply: called with the module and the value instead of `rebuild_chain`, also if the value
            has not changed.
    """
    return Setting(checked, False, apply)


def flag_setting(
    checked: Callable[[Any, bool], bool] | None = None,
    apply: Callable[[Any, bool], None] | None = None,
) -> Any:
    """A `setting` that is True or False."""
    return Setting(checked, True, apply)


def own_settings(module: nn.Module) -> dict[str, Any]:
    """The settings of a module by name, without those that say how ranks share the module."""
    kinds = type(module).__mro__
    names = {n for kind in kinds for n, one in vars(kind).items() if isinstance(one, Setting)}
    return {name: getattr(module, name) for name in names - {"parallel_mode", "sequence_parallel"}}
