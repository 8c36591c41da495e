"""A layer of one process becomes the layer that ranks share.

Its constructor runs again, with the group and without memory. What that makes takes the place of
what the layer had, and parameters are cut. Hooks, names and the objects themselves stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch.fp8.model_init import ModelInit, quantized_model_init
from transformer_engine.pytorch.module.settings import own_settings
from transformer_engine.pytorch.parallel.construction import made_with
from transformer_engine.pytorch.parallel.shards import Shard
from transformer_engine.pytorch.scale_layout import layout_of
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.attributes import InitialValue
from transformer_engine.pytorch.tensor.weight_quantizer import WeightQuantizer
from transformer_engine.pytorch.tensor.writing import ShardRanks


def counterpart(path: str, module: nn.Module, changes: dict[str, Any]) -> nn.Module:
    """The same layer for several ranks, on meta; the layer itself stays as it is.

    Args:
        path: of the layer in its model, for messages.
        module: a layer of this package.
        changes: arguments of its constructor that are others now.

    Raises:
        TypeError, ValueError, NotImplementedError: see `parallelize`.
    """
    where = f"(module {path!r})" if path else f"(layer {getattr(module, 'name', '?')})"
    arguments = made_with(module)
    kind: Any = type(module)
    if arguments is None:
        raise TypeError(
            f"[parallelize] expected layers of transformer_engine, got {kind.__name__}, whose "
            f"constructor is its own; give it tp_group there {where}"
        )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"[parallelize] expected a model before fully_shard, got {name} cut {where}"
            )
    if any(getattr(part, "tp_size", 1) > 1 for part in module.modules()):
        raise ValueError(
            f"[parallelize] expected a layer of one process, got one for several ranks {where}"
        )
    takes_device = "device" in {*kind.__init__.__annotations__, *arguments}
    device = {"device": "meta"} if takes_device else {}
    with torch.device("meta"), _weights_as_in(module):
        made: nn.Module = kind(**{**arguments, **changes, **device, "name": module.name})
    return made


def _weights_as_in(module: nn.Module) -> quantized_model_init:
    """The scope in which a layer was made whose weights are in FP8, or are not."""
    sets = [getattr(part, "_parameter_set", None) for part in module.modules()]
    found = next((one.init for one in sets if one is not None and one.init.enabled), ModelInit())
    return quantized_model_init(found.enabled, found.recipe, found.preserve)


def become(module: Any, made: Any) -> None:
    """Let a layer be what its counterpart is, with this rank's part of its parameters."""
    for name, part in module.named_children():
        become(part, made.get_submodule(name))
    layer = getattr(module, "name", None)
    scaling = getattr(module, "scaling", None)
    torch_has = vars(nn.Module()).keys()
    changed = {key: value for key, value in vars(made).items() if key not in torch_has}
    settings = own_settings(module)
    vars(module).update(changed)
    if layer is not None:
        module.name = layer
    for name, value in settings.items():  # some may have been set after construction
        setattr(module, name, value)
    own: Any = getattr(module, "_parameter_set", None)
    for name, parameter in [*module.named_parameters(recurse=False)] if own else ():
        spec = own.spec(name)
        data, shard = parameter.detach(), None if spec is None else spec.shard
        if shard is not None:
            data = _part(parameter, shard, made.get_parameter(name))
        own.adopt(module, name, data, parameter.requires_grad)
        if shard is not None:
            _share_initial_value(parameter, module.get_parameter(name), shard, shard.ranks.rank)
    if scaling:
        module.scaling = scaling


def _part(parameter: torch.Tensor, shard: Shard, made: torch.Tensor) -> torch.Tensor:
    """This rank's part, in FP8 where the counterpart has that: sizes of parts may not allow it."""
    rank, data = shard.ranks.rank, parameter.detach()
    assert rank is not None
    if not isinstance(data, QuantizedTensor):
        return shard.of(data, rank).clone()
    if isinstance(made, QuantizedTensor):
        return _fp8_part(data, shard, rank)
    return shard.of(data.dequantize(), rank).clone()


def _fp8_part(weight: QuantizedTensor, shard: Shard, rank: int) -> QuantizedTensor:
    """The part of a rank, with the values that it has in the whole.

    The parts keep one scale, that of the whole: who writes them reduces their largest magnitude.
    Blocks of 128 are those of the part. All ranks call it.
    """
    quantizer = WeightQuantizer.writing(weight).over(
        ShardRanks(layer=(shard.ranks.check(),), groups=())
    )
    values = shard.of(weight.decoded(torch.float32), rank).contiguous()
    scales = None if layout_of(weight._format).in_blocks else weight.scales
    matrix = quantizer.restored(values, scales, weight.dtype)
    return quantizer.holding(matrix.codes, matrix.scales, weight.dtype)


def _share_initial_value(weight: Any, part: Any, shard: Shard, rank: int) -> None:
    """Let a part have its part of what the weight was initialised with, where that is kept."""
    initial = getattr(weight, "initial_value", None)
    if initial is not None and initial.get() is not None:
        InitialValue(shard.of(initial.get(), rank).clone()).attach(part)
