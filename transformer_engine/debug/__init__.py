"""The precision debugger's side of `transformer_engine`: what it does inside layers."""

from __future__ import annotations


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """Choose how statistics of weights that tensor parallel ranks share are reduced.

    Args:
        enabled: True (the default) reduces them over the tensor parallel group of the layer, as one
            weight; with False, each rank logs the statistics of its shard.

    >>> set_weight_tensor_tp_group_reduce(True)
    """
    # A circular import otherwise: layers import this package, and `session` imports layers.
    from transformer_engine.debug.session import reduce_weights  # noqa: PLC0415

    reduce_weights(bool(enabled))


__all__ = ["set_weight_tensor_tp_group_reduce"]
