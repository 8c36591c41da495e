"""What each rank of distributed/test_first_dimension runs."""

from typing import Any

import torch
from rank_device import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed


def along_the_first_dimension(rank: int) -> dict[str, Any]:
    """Results of the collectives, waited for at once and later."""
    x = torch.arange(8.0, device=here()).view(4, 2) + 10.0 * rank
    found: dict[str, Any] = {
        "number": (distributed.get_distributed_rank(), distributed.get_distributed_world_size())
    }
    for later in (False, True):
        for name, call in (
            ("sum", lambda later: distributed.allreduce(x.clone(), None, later)),
            ("gather", lambda later: distributed.gather_along_first_dim(x.t(), None, later)),
            ("scatter", lambda later: distributed.reduce_scatter_along_first_dim(x, None, later)),
        ):
            made, handle = call(later)
            assert (handle is not None) == later
            if later:
                handle.wait()
            found[f"{name} {later}"] = made.cpu()
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=here())
    made, _ = distributed.gather_along_first_dim(x, None, quantizer=quantizer)
    found["quantized"] = isinstance(made, te.Float8Tensor), made.dequantize().cpu()
    try:
        distributed.reduce_scatter_along_first_dim(x[:3], None)
    except ValueError as error:
        found["error"] = str(error)
    return found
