"""Modules, ways to checkpoint and a reader of scaling state for the tests of checkpointing."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te

HIDDEN = 32

MODES = {
    "te": lambda f, *a: te.checkpoint(f, *a, use_reentrant=True),
    "te not reentrant": lambda f, *a: te.checkpoint(f, *a, use_reentrant=False),
    "torch": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch not reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
}
Wrap = Callable[..., Any]


def deepspeed_checkpoint(function: Wrap, *args: Any) -> Any:
    """Does what DeepSpeed's `non_reentrant_checkpoint` does, with its names of hooks and variables.

    Recompute regions recognise DeepSpeed's hooks by these names.
    """

    class Holder:
        pass

    storage: Any = weakref.WeakKeyDictionary()
    weak_holder_list: list[Any] = []
    leaf_tensors: list[torch.Tensor] = []

    def checkpoint_pack(tensor_from_forward: torch.Tensor) -> Any:
        res = Holder()
        weak_holder_list.append(weakref.ref(res))
        if tensor_from_forward.requires_grad and tensor_from_forward.is_leaf:
            leaf_tensors.append(tensor_from_forward)
        return res

    def checkpoint_unpack(holder_from_backward: Any) -> torch.Tensor:
        if len(storage) == 0:
            unpack_counter = 0

            def replay_pack(tensor_from_replay: torch.Tensor) -> None:
                nonlocal unpack_counter
                unpack_counter += 1
                holder = weak_holder_list[unpack_counter - 1]()
                if holder is not None:
                    storage[holder] = tensor_from_replay.detach()

            def replay_unpack(none_value: Any) -> Any:
                raise RuntimeError("the graph of a replay has no backward")

            inputs = [x.detach().requires_grad_(x.requires_grad) for x in args]
            hooks = saved_tensors_hooks(replay_pack, replay_unpack)
            with torch.enable_grad(), hooks:
                function(*inputs)
        return storage[holder_from_backward]

    with saved_tensors_hooks(checkpoint_pack, checkpoint_unpack):
        return function(*args)


def build(device: str, dropout: float = 0.0) -> nn.ModuleDict:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "params_dtype": torch.float32}
    probabilities = {"hidden_dropout": dropout, "attention_dropout": dropout}
    modules = {
        "linear": te.Linear(HIDDEN, HIDDEN, **options),
        "mlp": te.LayerNormMLP(HIDDEN, 64, **options),
        "layer": te.TransformerLayer(HIDDEN, 64, 2, **probabilities, **options),
    }
    return nn.ModuleDict(modules)


def uncheckpointed(function: Wrap, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def states(modules: nn.Module) -> list[torch.Tensor]:
    """Returns scales and amax histories, after updates that compiled code has deferred."""
    with te.fp8_autocast():
        pass
    scaling = (state for m in modules.modules() for state in getattr(m, "scaling", {}).values())
    return [t.clone() for state in scaling for t in (state.scale, state.amax_history)]
