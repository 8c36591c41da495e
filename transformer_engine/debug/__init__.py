"""The precision debugger's side of `transformer_engine`: what it does inside layers."""

from __future__ import annotations


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """Choose how statistics of weights that tensor parallel ranks share are reduced.

    Args:
        enabled: over the ranks of the layer's tensor parallel group, as one weight (the default);
            else each rank logs its own shard.

    >>> set_weight_tensor_tp_group_reduce(True)
    """
    # Layers import this package, and sessions import layers.
    from transformer_engine.debug.session import reduce_weights  # noqa: PLC0415

    reduce_weights(bool(enabled))


__all__ = ["set_weight_tensor_tp_group_reduce"]
