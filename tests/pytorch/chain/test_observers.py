"""Hooks, subclasses and replaced parts of a layer take effect, with inputs of any size."""

import pytest
import torch
import torch.distributed as dist
from fused_layers import batch, build, is_fused, observed
from precisions import scope
from rulers import assert_bitwise
from sizes import as_large_inputs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

CLASSES = {
    "LayerNormLinear": te.LayerNormLinear,
    "Linear": te.Linear,
    "LayerNormMLP": te.LayerNormMLP,
    "DotProductAttention": te.DotProductAttention,
    "MultiheadAttention": te.MultiheadAttention,
}


@pytest.fixture(params=["small", "large"])
def size(request):
    """Inputs of one size count as small, so that layers are fused, or as large."""
    with as_large_inputs(request.param == "large"):
        yield request.param


def run(layer, device, x=None):
    y = layer(batch(device) if x is None else x)
    y.sum().backward()
    return y


@pytest.mark.parametrize("name", CLASSES)
def test_a_forward_that_was_replaced_on_the_class(device, size, name, monkeypatch):
    layer, kind, seen = build(device), CLASSES[name], []
    assert is_fused(layer(batch(device))) == (size == "small")
    with observed(*[m for m in layer.modules() if type(m) is kind]):
        expected = layer(batch(device))
    forward = kind.forward

    def replaced(self, *args, **kwargs):
        seen.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", replaced)
    assert_bitwise(run(layer, device), expected)
    assert len(seen) == 1


@pytest.mark.parametrize("name", CLASSES)
def test_a_forward_that_was_replaced_on_the_object(device, size, name):
    layer, seen = build(device), []
    (module,) = [m for m in layer.modules() if type(m) is CLASSES[name]]
    layer(batch(device))
    with observed(module):
        expected = layer(batch(device))
    forward = module.forward
    module.forward = lambda *args, **kwargs: seen.append(1) or forward(*args, **kwargs)
    assert_bitwise(run(layer, device), expected)
    assert seen == [1]


HOOKS = {
    "forward": lambda module, seen: module.register_forward_hook(lambda *_: seen.append(1)),
    "forward pre": lambda module, seen: module.register_forward_pre_hook(lambda *_: seen.append(1)),
    "backward": lambda module, seen: module.register_full_backward_hook(lambda *_: seen.append(1)),
    "backward pre": lambda module, seen: module.register_full_backward_pre_hook(
        lambda *_: seen.append(1)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", CLASSES)
def test_hooks(device, size, name, kind):
    layer, seen = build(device), []
    run(layer, device)
    (module,) = [m for m in layer.modules() if type(m) is CLASSES[name]]
    handle = HOOKS[kind](module, seen)
    run(layer, device)
    assert seen == [1]
    handle.remove()
    run(layer, device)
    assert seen == [1]


def test_hooks_on_all_modules(device, size):
    layer, seen = build(device), []
    run(layer, device)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        run(layer, device)
    finally:
        handle.remove()
    assert set(CLASSES) < set(seen)


def test_a_subclass(device, size):
    class Doubled(te.Linear):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    layer = build(device)
    run(layer, device)
    mine = Doubled(64, 64, params_dtype=torch.bfloat16, device=device)
    mine.load_state_dict(layer.self_attention.proj.state_dict())
    with torch.no_grad():
        for p in layer.self_attention.proj.parameters():
            p.mul_(2)
    with observed(layer.self_attention.proj):
        expected = layer(batch(device))
    layer.self_attention.proj = mine
    assert_bitwise(run(layer, device), expected)


class Lora(nn.Module):
    """Adds a low-rank product to a projection, as the library peft does."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        options = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Linear(base.in_features, rank, bias=False, **options)
        self.up = nn.Linear(rank, base.out_features, bias=False, **options)

    def forward(self, x, *args, **kwargs):
        return self.base(x, *args, **kwargs) + self.up(self.down(x))


def test_low_rank_adapters(device, size):
    layer = build(device)
    before = run(layer, device)
    layer.requires_grad_(False)
    layer.self_attention.proj = Lora(layer.self_attention.proj)
    y = run(layer, device)
    assert not torch.equal(y, before)
    assert layer.self_attention.proj.up.weight.grad.any()
    assert layer.self_attention.proj.base.weight.grad is not None  # from the first run


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_parametrisations(device, size):
    layer = build(device)
    run(layer, device)
    with torch.no_grad():
        halved = build(device)
        halved.self_attention.proj.weight.div_(2)
    with observed(halved.self_attention.proj):
        expected = halved(batch(device))
    parametrize.register_parametrization(layer.self_attention.proj, "weight", Halved())
    layer.zero_grad()
    assert_bitwise(run(layer, device), expected)
    original = layer.self_attention.proj.parametrizations.weight.original
    assert original.grad.any()
    with scope("delayed"):
        run(layer, device)


def test_an_argument_that_is_as_it_would_be_without(device):
    """An argument that is equal to the layer's setting changes neither the result nor the path."""
    layer = build(device)
    expected = layer(batch(device))
    for arguments in (
        {"self_attn_mask_type": "causal"},
        {"window_size": (-1, 0)},
        {"checkpoint_core_attention": False},
        {"core_attention_bias_type": "no_bias"},
        {"is_first_microbatch": None},
    ):
        y = layer(batch(device), **arguments)
        assert is_fused(y)
        assert_bitwise(y, expected)


def test_gradients_that_somebody_waits_for_leave_part_by_part(device, size):
    """With hooks on parameters, the MLP's gradients are ready before attention's backward runs."""
    layer, order = build(device), []
    expected = run(layer, device)
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    y = run(layer, device)
    assert_bitwise(y, expected)
    assert not is_fused(y)
    first = [name.split(".")[0] for name in order]
    assert first == sorted(first)  # layernorm_mlp, then self_attention
    layer, seen = build(device), []
    layer.self_attention.proj.weight.register_hook(lambda grad: seen.append(grad.shape))
    run(layer, device)
    assert seen == [(64, 64)]


def test_saved_tensors_that_pass_through_hooks(device, size):
    layer, packed = build(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = layer(batch(device))
    assert not is_fused(y) and packed


def test_children_that_are_exchanged(device):
    layer, other = build(device), build(device)
    with torch.no_grad():
        other.layernorm_mlp.fc1_weight.mul_(3)
    expected = other(batch(device))
    layer(batch(device))
    layer.layernorm_mlp = other.layernorm_mlp
    y = layer(batch(device))
    assert is_fused(y)
    assert_bitwise(y, expected)


@pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")
def test_torch_autocast_and_fp8_attention(device):
    layer = build(device, params_dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        assert not is_fused(layer(batch(device).float()))
    layer = build(device)
    with te.fp8_autocast(fp8_recipe=DelayedScaling(fp8_dpa=True)):
        assert is_fused(layer(batch(device)))
    assert is_fused(layer(batch(device)))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_fully_shard_sees_every_part(one_rank):
    """Each part runs as a node of its own, so its gradients are sent while the backward runs."""
    layer = build()
    with observed(layer.self_attention, layer.layernorm_mlp):
        expected = run(layer, "cpu")
    layer.zero_grad()
    for part in (layer.self_attention, layer.layernorm_mlp, layer):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    y = run(layer, "cpu")
    assert not is_fused(y)
    assert_bitwise(y, expected)
    assert all(p.grad is not None for p in layer.parameters())


def test_distributed_data_parallel_is_no_observer(one_rank):
    """Its hooks on the nodes that accumulate gradients do not make layers run part by part."""
    layer = build()
    expected = run(layer, "cpu")
    y = run(DistributedDataParallel(layer), "cpu")
    assert is_fused(y)
    assert_bitwise(y, expected)
