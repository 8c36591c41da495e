"""`is_first_microbatch` of a graphed callable reaches its layers through any container."""

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te


class OwnFlag(te.Linear):
    """Passes `is_first_microbatch` itself, as Megatron's layers do."""

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return super().forward(inp, is_first_microbatch=True)


class PassesAll(nn.Module):
    """Has `**kwargs` in the signature of its `forward`, but must not get any."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs) -> torch.Tensor:
        assert not kwargs
        return self.layer(*args)


CONTAINERS = {
    "Sequential": lambda: nn.Sequential(te.Linear(16, 16, device="cpu"), nn.ReLU()),
    "own flag": lambda: PassesAll(OwnFlag(16, 16, device="cpu")),
    "grouped": lambda: PassesAll(Rows(te.GroupedLinear(2, 16, 16, device="cpu"))),
}


class Rows(nn.Module):
    """Gives each of the two GEMMs of a `GroupedLinear` half of the rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, [len(x) // 2] * 2)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_on_the_cpu_containers_hand_on_which_micro_batch_it_is(make) -> None:
    """A script that graphs a container with cached weights also runs without a GPU."""
    model, x = make(), torch.ones(32, 16)
    with pytest.warns(UserWarning, match="CUDA graphs need samples"):
        graphed = te.make_graphed_callables(model, (x,), fp8_enabled=True, fp8_weight_caching=True)
    assert graphed is model
    with te.fp8_autocast():
        first = model(x, is_first_microbatch=True)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.zero_()
        assert torch.equal(model(x, is_first_microbatch=False), first), "the cached weight"
    model.reset()
    with pytest.raises((TypeError, AssertionError)):
        model(x, is_first_microbatch=True)
