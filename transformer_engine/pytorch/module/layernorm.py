"""`LayerNorm`: y = (x - mean) / sqrt(var + eps) * gamma + beta."""

from __future__ import annotations

from transformer_engine.pytorch.chain.flow import joins_chains
from transformer_engine.pytorch.module.norms import NormModule


@joins_chains
class LayerNorm(NormModule):
    """Layer normalisation over the last axis, with fp32 statistics.

    Args:
        hidden_size: size of the last axis.
        eps: added to the variance.
        sequence_parallel: set as an attribute of the parameters, which data-parallel trainers read.
        params_dtype: dtype of the parameters; None is torch's default dtype.
        dtype: torch's spelling of `params_dtype`.
        zero_centered_gamma: start gamma at 0 and multiply by `1 + gamma`.
        device: device of the parameters; None is cuda where there is one, else cpu.
        normalized_shape: another name of `hidden_size`; or the sizes of the last axes, which are
            then normalised together, and are the shape of the parameters.
        name: for messages and the debugger.
        others: `sm_margin` has no effect; `bias` and `elementwise_affine` of torch's norms may be
            True.

    Raises:
        ValueError: not exactly one of `hidden_size` and `normalized_shape`; no size; a
            negative `eps`.
        NotImplementedError: a norm without parameters.

    >>> import torch
    >>> LayerNorm(8, device="cpu")(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    kind = "LayerNorm"
