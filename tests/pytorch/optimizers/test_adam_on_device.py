"""`FusedAdam(capturable=True)` takes torch's steps, up to rounding, without the host."""

import copy

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.kernels.adam import AdamRules, AdamTensors, adam
from transformer_engine.pytorch.optimizers import FusedAdam, clip_factor

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
# Less than an access of four values, no values, several blocks, and no multiple of an access.
SHAPES = [(5, 7), (3,), (), (0, 4), (16, 1024), (4099,)]


def parameters(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def give_gradients(own, generator, dtype=None):
    for p in own:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, dtype or p.dtype)


def train(optimizer, own, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        give_gradients(own, generator)
        optimizer.step()


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("betas", [(0.8, 0.9), (0.9, 0.999), (0.0, 0.5)])
def test_fp32_parameters(adam_w_mode, betas, device):
    settings = {**SETTINGS, "betas": betas}
    ours = parameters(device)
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(exact, **settings)
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, capturable=True, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        give_gradients(ours, generator)
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.double()
        optimizer.step()
        reference.step()
    assert optimizer.param_groups[0]["step"].item() == 5
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("capturable", [False, True])
def test_without_moments_of_earlier_steps(capturable, device):
    """If both betas are 0, moments do not depend on the large gradient of the step before."""
    parameter = nn.Parameter(torch.ones(2, device=device))
    optimizer = FusedAdam([parameter], betas=(0.0, 0.0), capturable=capturable)
    for gradient in (100.0, 1e-3):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["exp_avg"], parameter.grad, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(state["exp_avg_sq"], parameter.grad**2, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("betas", [(0.8, 0.9), (0.0, 0.5)])
def test_without_bias_correction(capturable, betas, device):
    """Steps follow the definition, also those of copies; other values in groups are refused."""
    own = nn.Parameter(torch.randn(5, 7, device=device))
    optimizer = FusedAdam(
        [own], **{**SETTINGS, "betas": betas}, bias_correction=False, capturable=capturable
    )
    exact = own.detach().double()
    mean, square = torch.zeros_like(exact), torch.zeros_like(exact)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        give_gradients([own], generator)
        gradient = own.grad.double()
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient.square()
        step = mean / (square.sqrt() + SETTINGS["eps"]) + SETTINGS["weight_decay"] * exact
        exact -= SETTINGS["lr"] * step
        optimizer.step()
        optimizer = copy.deepcopy(optimizer)
        own = optimizer.param_groups[0]["params"][0]
        torch.testing.assert_close(own.detach().double(), exact, rtol=1e-5, atol=2e-6)
    assert int(optimizer.param_groups[0]["step"]) == 4
    with pytest.raises(NotImplementedError, match="expected bias_correction=False, the only"):
        optimizer.add_param_group({"params": [own], "bias_correction": True})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["bias_correction"] = True
    with pytest.raises(NotImplementedError, match="expected bias_correction=False, the only"):
        optimizer.load_state_dict(saved)
    with pytest.raises(TypeError, match="expected bias_correction to be True or False, got 'no'"):
        FusedAdam([own], bias_correction="no")
    with pytest.raises(ValueError, match=r"expected exp_avg of shape \(5, 7\), got \(7,\)"):
        optimizer.set_scaled_state(own, "exp_avg", torch.zeros(7, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [True, False])
def test_narrow_parameters_are_rounded_in_the_same_pass(dtype, masters, device):
    own = parameters(device, dtype)
    wide = [nn.Parameter(p.detach().float()) for p in own]
    optimizer = FusedAdam(own, master_weights=masters, capturable=True, **SETTINGS)
    follower = FusedAdam(wide, capturable=True, **SETTINGS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        give_gradients(own, generator)
        for p, w in zip(own, wide, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
        follower.step()
        for p, w in zip(own, wide, strict=True):
            value = optimizer.get_unscaled_state(p, "master_param") if masters else w.detach()
            torch.testing.assert_close(value, w.detach())
            torch.testing.assert_close(p.detach(), value.to(dtype))
            if not masters:
                w.data.copy_(p)


def test_gradients_of_several_dtypes(device):
    own = parameters(device)
    for p, dtype in zip(own, [torch.bfloat16, torch.float16, torch.float32] * 2, strict=True):
        p.decoupled_grad = torch.ones_like(p).to(dtype)
    before = [p.detach().clone() for p in own]
    FusedAdam(own, lr=0.5, capturable=True, use_decoupled_grad=True).step()  # by the learning rate
    for p, start in zip(own, before, strict=True):
        torch.testing.assert_close(p.detach(), start - 0.5)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, DelayedScaling, Float8BlockScaling])
def test_fp8_parameters_are_the_cast_of_their_masters(recipe, device):
    with te.fp8_model_init(recipe=recipe()):
        model = te.LayerNormMLP(64, 144, params_dtype=torch.bfloat16, device=device)
    optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True, capturable=True)
    weights = [p for p in model.parameters() if isinstance(p, te.QuantizedTensor)]
    addresses = [w.parts[0].data_ptr() for w in weights]
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, device=device).to(p.dtype)
        optimizer.step()
        for w in weights:
            master = optimizer.get_unscaled_state(w, "master_param")
            for part, wanted in zip(w.parts, w.quantized(master), strict=True):
                assert part is wanted is None or torch.equal(part, wanted.view(part.shape)), step
    assert [w.parts[0].data_ptr() for w in weights] == addresses


def test_amaxes_are_raised(device):
    values = [torch.randn(shape, device=device) for shape in ((7,), (5, 4099), (3, 64))]
    values[1][2, 3], values[2][0, 0] = torch.nan, torch.inf
    amaxes = torch.tensor([0.0, 0.0, 0.5], device=device).split(1)
    states = [[torch.zeros_like(v) for v in values] for _ in range(3)]
    one = torch.ones(1, device=device)
    rules = AdamRules(0.9, 0.999, 1e-8, 0.0, True)
    none = [None] * len(values)
    adam(AdamTensors(values, *states, none, amaxes), one, 0 * one, None, rules)
    wanted = [v.nan_to_num(nan=0.0, posinf=torch.inf).abs().max() for v in values]
    assert torch.cat(amaxes).tolist() == torch.stack(wanted).tolist()
    large = torch.full((1,), 9e9, device=device)
    tensors = AdamTensors(values[:1], *[s[:1] for s in states], [None], [large])
    adam(tensors, one, 0 * one, None, rules)
    assert large.item() == torch.tensor(9e9).item()


def test_fp8_parameters():
    with te.fp8_model_init(recipe=Float8CurrentScaling(), preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
    start = layer.weight.get_high_precision_init_val().float()
    optimizer = FusedAdam(layer.parameters(), lr=0.1, master_weights=True, capturable=True)
    for p in layer.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer.step()
    master = optimizer.get_unscaled_state(layer.weight, "master_param")
    torch.testing.assert_close(master, start - 0.1)
    torch.testing.assert_close(layer.weight.dequantize().float(), master, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("capturable", [False, True])
def test_clipping_takes_no_pass(capturable, device):
    ours, theirs = parameters(device), parameters(device)
    generator = torch.Generator().manual_seed(1)
    give_gradients(ours, generator)
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone()
    norm, factor = clip_factor(ours, 2.0)
    expected = nn.utils.clip_grad_norm_(theirs, 2.0)
    torch.testing.assert_close(norm, expected)
    assert 0 < factor < 1
    settings = {"lr": 0.1, "eps": 1e-2, "capturable": capturable}
    FusedAdam(ours, **settings).step(grad_factor=factor)
    FusedAdam(theirs, **settings).step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
    assert clip_factor(ours, 1e9)[1] == 1.0
    alone = clip_factor(ours[0], 1e-3)
    assert alone[0] == ours[0].grad.norm() and alone[1] < 1
    assert [x.item() for x in clip_factor([nn.Parameter(torch.ones(2))], 1.0)] == [0.0, 1.0]
    mixed = [nn.Parameter(torch.zeros(1, dtype=t)) for t in (torch.float64, torch.bfloat16)]
    for parameter, grad in zip(mixed, (3.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, grad)
    assert [(x.item(), x.dtype) for x in clip_factor(mixed, 5.0)[:1]] == [(5.0, torch.float32)]


def test_resumed_runs_take_the_same_steps(device):
    """Also if the saved number of steps is an int, as without `capturable`."""
    own = parameters(device, torch.bfloat16)
    optimizer = FusedAdam(own, master_weights=True, capturable=True, **SETTINGS)
    train(optimizer, own)
    again = [nn.Parameter(p.detach().clone()) for p in own]
    resumed = FusedAdam(again, master_weights=True, capturable=True)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["step"] = 4
    resumed.load_state_dict(state)
    train(optimizer, own)
    train(resumed, again)
    for one, other in zip(own, again, strict=True):
        assert_bitwise(one.detach(), other.detach())


@pytest.mark.parametrize("capturable", [False, True])
def test_fp32_parameters_follow_their_masters(capturable, device):
    """They have masters, which may be remainders, because the model was in bf16 before."""
    start = nn.Linear(16, 1, bias=False).to(device, torch.bfloat16)
    stepped = []
    for remainders in (False, True):
        own = copy.deepcopy(start)
        settings = {"master_weights": True, "store_param_remainders": remainders}
        optimizer = FusedAdam(own.parameters(), lr=0.1, capturable=capturable, **settings)
        for seed in range(2):
            give_gradients([own.weight], torch.Generator().manual_seed(seed))
            optimizer.step()
            own.float()
        assert_bitwise(own.weight.detach(), optimizer.state[own.weight]["master_param"])
        stepped.append(own.weight.detach())
    assert_bitwise(*stepped)


@pytest.mark.parametrize("capturable", [False, True])
def test_written_tensors_count_their_writes(capturable):
    """Autograd and caches of transposed codes compare version counters."""
    own = parameters()
    give_gradients(own, torch.Generator())
    before = own[0]._version
    FusedAdam(own, capturable=capturable).step()
    assert own[0]._version > before


def test_lists_that_do_not_fit():
    x, one, none = [torch.ones(4)], torch.ones(1), [None]
    half, low = [x[0].half()], [x[0].short()]
    rules = AdamRules(0.9, 0.9, 1e-8, 0.0, True)

    def refuses(message, *lists, error=ValueError):
        with pytest.raises(error, match=rf"^\[adam\] expected {message}"):
            adam(AdamTensors(*lists), one, one, None, rules)

    refuses("lists of one length", x, x, x, x * 2, none, none)
    refuses("lists of one length", x, x, x, x, none, [one, one])
    refuses(r"shape \(4\) for the mean", x, [torch.ones(3)], x, x, none, none)
    refuses("float32 for the parameter", half, x, x, x, none, none, error=TypeError)
    refuses("float32 for the mean of squares", x, x, half, x, none, none, error=TypeError)
    refuses("weights or amaxes .* got both", x, x, x, x, half, [one])
    for weights, got in ((none, "none"), (half, "float16")):
        refuses(f"bfloat16 weights beside the low bits .*, got {got}$", low, x, x, x, weights, none)


@pytest.mark.parametrize("capturable", [False, True])
def test_steps_are_counted_in_fp32(capturable, device, default_dtype):
    """Whatever torch's default dtype is; in bf16, 301 would be 300."""
    values = torch.randn(8, dtype=torch.float32).to(device)

    def stepped():
        own = nn.Parameter(values.clone())
        own.grad = values.sin()
        slow = {**SETTINGS, "betas": (0.8, 0.9999)}  # its bias correction still changes here
        optimizer = FusedAdam([own], capturable=capturable, **slow)
        optimizer.param_groups[0]["step"] = 300
        optimizer.step()
        return own.detach()

    found = stepped()
    torch.set_default_dtype(torch.float32)
    assert_bitwise(found, stepped())
    torch.set_default_dtype(default_dtype)
    assert all(x.dtype is torch.float32 for x in clip_factor([], 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("remainders", [False, True])
def test_captured_steps_are_eager_steps(remainders):
    """The learning rate and the factor of the gradients change between replays."""
    ours, theirs = (parameters("cuda", torch.bfloat16) for _ in range(2))
    rate = torch.tensor(0.1, device="cuda")
    settings = {"lr": rate, "master_weights": True, "store_param_remainders": remainders}
    optimizers = [FusedAdam(own, capturable=True, **settings) for own in (ours, theirs)]
    for optimizer, own in zip(optimizers, (ours, theirs), strict=True):
        train(optimizer, own, steps=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step(grad_factor=clip_factor(ours, 1.0)[1])
    for i in range(3):
        rate.fill_(0.1 / (i + 1))
        for p, q in zip(ours, theirs, strict=True):
            p.grad.copy_(torch.randn_like(p) * i)
            q.grad.copy_(p.grad)
        graph.replay()
        optimizers[1].step(grad_factor=clip_factor(theirs, 1.0)[1])
    for one, other in zip(ours, theirs, strict=True):
        assert_bitwise(one.detach(), other.detach())


def test_groups_without_parameters_count_their_steps(device):
    """A rank may have no parameters of a group. Other ranks may load its number of steps."""
    own = parameters(device)[:1]
    optimizer = FusedAdam([{"params": own}, {"params": []}], capturable=True)
    train(optimizer, own)
    optimizer.found_inf = torch.ones((), device=device)
    train(optimizer, own, steps=1)
    counts = [group["step"] for group in optimizer.state_dict()["param_groups"]]
    assert [(int(count), count.device) for count in counts] == [(4, own[0].device)] * 2


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("remainders", [False, True])
def test_memory_of_the_kernel(remainders):
    own = parameters("cuda", torch.bfloat16)
    moments = torch.bfloat16 if remainders else torch.float32
    optimizer = FusedAdam(
        own,
        master_weights=True,
        capturable=True,
        store_param_remainders=remainders,
        exp_avg_dtype=moments,
    )
    train(optimizer, own, steps=2)
