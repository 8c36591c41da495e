"""Offloaded layers leave only weights and very small tensors on the device."""

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from precisions import scope
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.offload.offload import Offload

LAYERS, HIDDEN, HEADS, MIB = 5, 512, 8, 2**20
MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, HIDDEN, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, HIDDEN, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, HIDDEN, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(HIDDEN, HEADS, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        HIDDEN, HIDDEN, HEADS, hidden_dropout=0.0, **kw
    ),
}


class Counted:
    """Returns empty tensors in place of copies."""

    def takes(self, x: torch.Tensor) -> bool:
        return True

    def out(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], object]:
        return [torch.empty(0) for _ in sources], None

    def wait(self, event: object) -> None:
        pass

    def free(self, host: torch.Tensor) -> None:
        pass


# A TransformerLayer contains the other modules.
@pytest.mark.sampled_on_cpu("TransformerLayer", "Linear-delayed")
@pytest.mark.parametrize("recipe", ["high precision", "delayed", "current"])
@pytest.mark.parametrize("name", MODULES)
def test_what_stays_is_small_or_a_weight(name: str, recipe: str) -> None:
    offload = Offload(LAYERS - 1, LAYERS, True, False, Counted())
    stays: list[torch.Tensor] = []
    takes = offload._takes

    def watched(x: torch.Tensor) -> bool:
        if not takes(x):
            stays.append(x)
        return takes(x)

    offload._takes = watched
    x = torch.randn(64, 64, HIDDEN)  # 4096 tokens: statistics of a norm are 16 KiB
    for _ in range(LAYERS):
        module = MODULES[name](device="cpu")
        with scope(recipe), offload:
            x = module(x)
        offload.synchronize()
    weights = [t for t in stays if isinstance(t, nn.Parameter) or hasattr(t, "weight_offloading")]
    others = [t.nbytes for t in stays if not any(t is weight for weight in weights)]
    assert weights and sum(others) < LAYERS * 4096


def requested() -> Counter[int]:
    """Count allocated blocks by their requested size, which the allocator may have rounded up."""
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return Counter(b["requested_size"] for b in blocks if b["state"] == "active_allocated")


def left_behind(modules: list[nn.Module], recipe: str, offloaded: int) -> Counter[int]:
    """Count the blocks that a forward leaves on the device, by size."""
    context, synchronize = te.get_cpu_offload_context(
        offloaded > 0, max(offloaded, 1), True, False, model_layers=len(modules)
    )
    gc.collect()
    before = requested()
    x = torch.randn(128, HIDDEN, HIDDEN, dtype=torch.bfloat16, device="cuda")
    # Needs a gradient, so that the first layer saves its weight, too. Autograd would keep a leaf.
    x = x + torch.zeros((), dtype=x.dtype, device="cuda", requires_grad=True)
    for module in modules:
        with scope(recipe), context:
            x = module(x)
        x = synchronize(x)
    torch.cuda.synchronize()
    found = requested()
    found.subtract(before)
    x.float().sum().backward()
    for module in modules:
        module.zero_grad()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["high precision", "delayed", "current"])
@pytest.mark.parametrize("name", MODULES)
def test_offloaded_layers_leave_their_weights(name: str, recipe: str) -> None:
    """Layers that are offloaded, all but the last, take the memory of one and their FP8 weights."""
    modules = [MODULES[name](device="cuda", params_dtype=torch.bfloat16) for _ in range(LAYERS)]
    left_behind(modules, recipe, LAYERS - 1)  # allocates workspaces, scales and pinned memory
    one = left_behind(modules[:1], recipe, 0)
    offloaded = left_behind(modules, recipe, LAYERS - 1)
    offloaded.subtract(one)
    parameters = sum(
        p.numel() for m in modules[1:] for k, p in m.named_parameters() if "weight" in k
    )
    weights = 0 if recipe == "high precision" else 2 * parameters  # row-wise and column-wise codes
    left = sum(size * count for size, count in offloaded.items()) - weights
    sizes = {size: count for size, count in offloaded.items() if count and size >= 4096}
    assert left < 0.1 * MIB, f"{left / MIB:.2f} MiB beside weights; sizes and counts: {sizes}"
