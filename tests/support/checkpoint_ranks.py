"""What each rank of distributed/test_checkpoint runs."""

import torch
import torch.distributed as dist
from rank_device import here

import transformer_engine.pytorch as te


def _inputs(rank: int) -> torch.Tensor:
    numbers = torch.arange(3 * 5 * 16, dtype=torch.float32, device=here())
    return numbers.view(3, 5, 16) * (rank + 1)


def _gradients(rank: int, reentrant: bool, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns the weight gradient, which is ones @ the input that the checkpoint saved."""
    layer = te.Linear(16, 16, bias=False, device=here(), params_dtype=torch.float32)
    x = _inputs(rank).requires_grad_()
    y = te.checkpoint(
        layer,
        x * 1.0,
        distribute_saved_activations=True,
        tp_group=tp_group,
        use_reentrant=reentrant,
    )
    y.backward(torch.ones_like(y))
    return layer.weight.grad.cpu()


def expected(first: int, second: int) -> torch.Tensor:
    """The gradients if `first` saved the first half of the input, and `second` the second half."""
    parts = [_inputs(rank).flatten() for rank in (first, second)]
    x = torch.cat([parts[0][:120], parts[1][120:]]).view(15, 16)
    return torch.ones(16, 15) @ x


def kept_parts(rank: int) -> dict[str, torch.Tensor]:
    """Returns weight gradients, which show the part of the input that each rank has saved."""
    group = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    return {
        "default group": _gradients(rank, True, None),
        "group": _gradients(rank, True, group),
        "one rank": _gradients(rank, True, alone),
        "not reentrant": _gradients(rank, False, None),
    }
