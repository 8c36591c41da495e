"""`FusedAdam` under `torch.amp.GradScaler` unscales gradients and skips steps that overflow."""

import pytest
import torch
from rulers import assert_bitwise
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.kernels.adam import AdamRules, AdamTensors, adam
from transformer_engine.pytorch.optimizers import FusedAdam

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(5, 7), (16, 1024), (4099,)]
OVERFLOWS = (0, 5)  # of nine steps, in which the scale grows three times


def parameters(device, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def scaler_on(device):
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
    scaler.scale(torch.ones((), device=device))  # makes the scale
    return scaler


def train(optimizer, own, step, grad_dtype=None, clip=None):
    """Nine steps; returns the scale after each."""
    device = own[0].device.type
    scaler, generator, scales = scaler_on(device), torch.Generator().manual_seed(1), []
    for number in range(9):
        for p in own:
            gradient = torch.randn(p.shape, generator=generator).to(device) * scaler.get_scale()
            p.grad = gradient.to(grad_dtype or p.dtype).to(p.dtype)
        if number in OVERFLOWS:
            own[1].grad[3, 5] = torch.inf
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own, clip)
        step(scaler, optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def by_scaler(scaler, optimizer):
    scaler.step(optimizer)


def by_optimizer(scaler, optimizer):
    optimizer.step(grad_scaler=scaler)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("step", [by_scaler, by_optimizer])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("adam_w_mode", "clip"), [(True, None), (False, None), (True, 2.0)])
def test_as_optimizers_of_torch(adam_w_mode, clip, capturable, step, device):
    """Weights, skipped steps and scales are equal, also after `unscale_` and clipping."""
    ours, theirs = parameters(device), parameters(device)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = kind(theirs, fused=True, **SETTINGS)
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, capturable=capturable, **SETTINGS)
    scales = train(reference, theirs, by_scaler, clip=clip)
    assert train(optimizer, ours, step, clip=clip) == scales
    assert min(scales) < 64.0 < max(scales)
    assert int(optimizer.param_groups[0]["step"]) == 9 - len(OVERFLOWS)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("step", [by_scaler, by_optimizer])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_fp16_gradients_of_masters(bias_correction, capturable, step, device):
    """The masters equal fp32 parameters that are stepped with the same gradients."""
    own, wide = parameters(device, torch.float16), parameters(device, torch.float16)
    wide = [nn.Parameter(p.detach().float()) for p in wide]
    settings = {**SETTINGS, "bias_correction": bias_correction, "capturable": capturable}
    optimizer = FusedAdam(own, master_weights=True, **settings)
    scales = train(optimizer, own, step)
    follower = FusedAdam(wide, **settings)
    assert train(follower, wide, by_scaler, torch.float16) == scales
    for p, w in zip(own, wide, strict=True):
        master = optimizer.get_unscaled_state(p, "master_param")
        torch.testing.assert_close(master, w.detach(), rtol=1e-5, atol=1e-5)
        assert_bitwise(p.detach(), master.half())


def everything(optimizer, own):
    held = [*own, *(s for p in own for s in optimizer.state[p].values())]
    tensors = [torch.tensor(float(optimizer.param_groups[0].get("step", 0)))]
    for one in held:
        parts = one.parts if isinstance(one, te.QuantizedTensor) else [one.detach()]
        tensors += [part.clone() for part in parts if part is not None]
    return tensors


def overflow(optimizer, own, factor=torch.inf):
    scaler = scaler_on(own[0].device.type)
    for p in own:
        p.grad = torch.full(p.shape, factor, dtype=p.dtype, device=p.device)
    scaler.step(optimizer)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, False), (torch.float16, False), (torch.float16, True)],
)
def test_an_overflow_changes_nothing(dtype, masters, capturable, device):
    own = parameters(device, dtype)
    optimizer = FusedAdam(own, master_weights=masters, capturable=capturable, **SETTINGS)
    start = [p.detach().clone() for p in own]
    overflow(optimizer, own)
    for p, value in zip(own, start, strict=True):
        assert_bitwise(p.detach(), value)
    overflow(optimizer, own, 1.0)
    before = everything(optimizer, own)
    assert len(before) == 1 + len(own) * (4 if masters else 3) and before[0] == 1
    overflow(optimizer, own)
    for one, other in zip(everything(optimizer, own), before, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, DelayedScaling, Float8BlockScaling])
def test_an_overflow_leaves_fp8_weights(recipe, dtype, capturable, device):
    """Also in the first step, whose masters are the dequantised weights."""
    with te.fp8_model_init(recipe=recipe()):
        own = list(te.LayerNormMLP(64, 144, params_dtype=dtype, device=device).parameters())
    optimizer = FusedAdam(own, master_weights=True, capturable=capturable, **SETTINGS)
    for p in own:
        optimizer.initialize_state(p)
    for factor in (1.0, -1.0):
        before = everything(optimizer, own)
        overflow(optimizer, own)
        for one, other in zip(everything(optimizer, own), before, strict=True):
            assert_bitwise(one, other)
        overflow(optimizer, own, factor)
        assert not torch.equal(everything(optimizer, own)[1], before[1])


class Waits(TorchDispatchMode):
    """Counts values that the host reads."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", [by_scaler, by_optimizer])
def test_the_host_waits_without_capturable_alone(step, device):
    for capturable in (False, True):
        own = parameters(device, torch.float16)
        optimizer = FusedAdam(own, master_weights=True, capturable=capturable)
        overflow(optimizer, own, 1.0)
        with Waits() as waits:
            step(scaler_on(device), optimizer)
        assert (waits.count == 0) is capturable


def test_the_spelling_of_the_optimizer(device):
    """`step(grad_scaler=...)` runs hooks once and keeps the `step` that a scheduler has set."""
    own = parameters(device)
    optimizer, calls = FusedAdam(own, lr=0.5, eps=0.0), []
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    wrapped = optimizer.step
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for p in own:
        p.grad = torch.ones_like(p)
    start = own[0].detach().clone()
    optimizer.step(grad_scaler=torch.amp.GradScaler(device, enabled=False))
    assert len(calls) == 1 and optimizer.step is wrapped
    scheduler.step()
    torch.testing.assert_close(own[0].detach(), start - 0.5)
    scaler = scaler_on(device)
    half = torch.tensor(0.5, device=device)
    optimizer.step(grad_scaler=scaler, grad_factor=half)
    assert_bitwise(own[0].grad, torch.full_like(own[0].grad, 1 / 64))
    with pytest.raises(RuntimeError, match="since the last update"):
        optimizer.step(grad_scaler=scaler)
    assert optimizer.step is wrapped


@pytest.mark.parametrize("capturable", [False, True])
def test_a_factor_beside_the_scale(capturable, device):
    own = nn.Parameter(torch.ones(4, dtype=torch.float16, device=device))
    own.grad = torch.full_like(own, 64.0)
    optimizer = FusedAdam([own], betas=(0.5, 0.5), capturable=capturable)
    optimizer.step(grad_scaler=scaler_on(device), grad_factor=torch.tensor(0.5, device=device))
    torch.testing.assert_close(optimizer.state[own]["exp_avg"], torch.full_like(own.float(), 0.25))


def test_what_is_refused(device):
    own = nn.Parameter(torch.ones(4, device=device))
    own.grad = own.decoupled_grad = torch.ones_like(own)
    with pytest.raises(TypeError, match=r"^\[FusedAdam\] expected grad_scaler to be a torch.amp"):
        FusedAdam([own]).step(grad_scaler=1)
    with pytest.raises(NotImplementedError, match=r"^\[FusedAdam\] expected closure=None with"):
        FusedAdam([own]).step(lambda: None, scaler_on(device))
    with pytest.raises(NotImplementedError, match=r"^\[FusedAdam\] expected gradients in param"):
        scaler_on(device).step(optimizer := FusedAdam([own], use_decoupled_grad=True))
    optimizer.step()  # no error without the scaler


@pytest.mark.parametrize("scaled", [False, True])
def test_an_error_leaves_no_scale_to_later_steps(scaled, device):
    own = nn.Parameter(torch.ones(4, device=device))
    optimizer, scaler = FusedAdam([own], betas=(0.5, 0.5), capturable=True), scaler_on(device)
    own.grad = torch.full_like(own, 64.0 if scaled else 1.0)
    with pytest.raises(TypeError, match="grad_factor"):
        scaler.step(optimizer, grad_factor=1.0)
    (scaler.step if scaled else FusedAdam.step)(optimizer)
    assert_bitwise(optimizer.state[own]["exp_avg"], torch.full_like(own.detach(), 0.5))


def test_the_kernel_raises_amaxes_of_what_it_leaves(device):
    values = [torch.randn(shape, device=device) for shape in SHAPES]
    before = [v.clone() for v in values]
    states = [[torch.ones_like(v) for v in values] for _ in range(3)]
    one, amaxes = torch.ones(1, device=device), torch.zeros(3, device=device)
    rules = AdamRules(0.9, 0.999, 1e-8, 0.1, True)
    none = [None] * len(values)
    adam(AdamTensors(values, *states, none, amaxes.split(1)), one, one, None, rules, 2 * one)
    for value, other in zip(values, before, strict=True):
        assert_bitwise(value, other)
    assert amaxes.tolist() == [v.abs().max().item() for v in values]
    with pytest.raises(ValueError, match=r"^\[adam\] expected 1 element for found_inf"):
        adam(AdamTensors(values, *states, none, none), one, one, None, rules, amaxes)


@pytest.mark.gpu
def test_replays_skip_by_what_they_find():
    own = nn.Parameter(torch.ones(64, dtype=torch.float16, device="cuda"))
    own.grad = torch.full_like(own, 64.0)
    optimizer = FusedAdam([own], master_weights=True, capturable=True)
    scaler = scaler_on("cuda")
    scaler.step(optimizer)
    scaler.update()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.step(optimizer)
    graph.replay()
    before = everything(optimizer, [own])
    own.grad.fill_(torch.inf)
    graph.replay()
    after = everything(optimizer, [own])
    assert before[0] == after[0] == 2
    for one, other in zip(after, before, strict=True):
        assert_bitwise(one, other)
