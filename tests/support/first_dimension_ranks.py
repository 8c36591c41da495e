"""What each rank of distributed/test_first_dimension runs."""

from typing import Any

import torch
from rank_device import here

import transformer_engine.pytorch as te
from nvdlfw_inspect import utils
from transformer_engine.pytorch import distributed


def along_the_first_dimension(rank: int) -> dict[str, Any]:
    """Returns results of the collectives, synchronous and asynchronous."""
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
    found["unequal"] = []
    for gather in (utils.gather_along_first_dim, utils.gather_tensor_on_last_rank):
        for rows in (4, 1 + 3 * rank, 3 - 3 * rank):
            made, _ = gather(x[:rows].t().contiguous().t(), None, async_op=False)
            later, handle = gather(x[:rows], None, async_op=True)
            handle.wait()
            assert (made is None and later is None) or torch.equal(made, later)
            found["unequal"].append(None if made is None else made.cpu())
    return found
