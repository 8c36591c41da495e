"""Turns a layer of one process into a layer that ranks share, in place.

`counterpart` runs the layer's constructor again on the meta device, with the process group.
`become` copies the attributes of the result to the layer, and cuts the layer's parameters. The
module objects, their hooks and their names stay the same.
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
from transformer_engine.pytorch.tensor.attributes import InitialValue, attributes_beside
from transformer_engine.pytorch.tensor.weight_quantizer import WeightQuantizer
from transformer_engine.pytorch.tensor.writing import ShardRanks


def counterpart(path: str, module: nn.Module, changes: dict[str, Any]) -> nn.Module:
    """The same layer for several ranks, on meta; the layer itself stays as it is.

    Messages name the layer `path`; `changes` are the arguments of the constructor that change. For
    errors see `parallelize`.
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
    """The `quantized_model_init` in which a layer was made, or one that is not enabled."""
    sets = [getattr(part, "_parameter_set", None) for part in module.modules()]
    found = next((one.init for one in sets if one is not None and one.init.enabled), ModelInit())
    return quantized_model_init(found.enabled, found.recipe, found.preserve)


def become(module: Any, made: Any) -> None:
    """Turn a layer into its counterpart, with this rank's part of the layer's parameters."""
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
        _keep_marks(parameter, module.get_parameter(name))
        if shard is not None:
            _share_initial_value(parameter, module.get_parameter(name), shard, shard.ranks.rank)
    if scaling:
        module.scaling = scaling


def _keep_marks(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Give a part the attributes that users have set, but no `main_grad`, which is of the whole."""
    if type(part) is type(parameter):
        marks = attributes_beside(parameter, part)
        marks.pop("main_grad", None)
        vars(part).update(marks)


def _part(parameter: torch.Tensor, shard: Shard, made: torch.Tensor) -> torch.Tensor:
    """This rank's part; in FP8 if the counterpart's is, which some sizes of parts rule out."""
    rank, data = shard.ranks.rank, parameter.detach()
    assert rank is not None
    if not isinstance(data, QuantizedTensor):
        return shard.of(data, rank).clone()
    if isinstance(made, QuantizedTensor):
        return _fp8_part(data, shard, rank)
    return shard.of(data.dequantize(), rank).clone()


def _fp8_part(weight: QuantizedTensor, shard: Shard, rank: int) -> QuantizedTensor:
    """The part of a rank, with the values that it has in the whole weight.

    If the weight has one scale, its parts keep that scale, and later writes reduce the amax over
    the ranks. If it has scales of blocks, the blocks are those of the part. All ranks must call it.
    """
    quantizer = WeightQuantizer.writing(weight).over(
        ShardRanks(layer=(shard.ranks.check(),), groups=())
    )
    values = shard.of(weight.decoded(torch.float32), rank).contiguous()
    scales = None if layout_of(weight._format).in_blocks else weight.scales
    matrix = quantizer.restored(values, scales, weight.dtype)
    return quantizer.holding(matrix.codes, matrix.scales, weight.dtype)


def _share_initial_value(weight: Any, part: Any, shard: Shard, rank: int) -> None:
    """Give a part its part of the weight's high-precision initial value, if that is kept."""
    initial = getattr(weight, "initial_value", None)
    if initial is not None and initial.get() is not None:
        InitialValue(shard.of(initial.get(), rank).clone()).attach(part)
