"""`FusedAdam` with states of fewer bits: how they are stored, and that steps compute in fp32."""

import copy
import pickle

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

from transformer_engine.pytorch.optimizers import FusedAdam, fused_adam
from transformer_engine.pytorch.optimizers.stored_states import joined_master, split_master

SHAPES = ((5, 3), (4,), (2, 2, 2), (4099,), (16, 1024))
DTYPES = {"b": torch.bfloat16, "h": torch.float16, "u": torch.uint8, "f": torch.float32}


def parameters(device, dtype=torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def step(optimizer, members, number: int) -> None:
    torch.manual_seed(100 + number)
    for p in members:
        p.grad = torch.randn(p.shape).to(p.device, p.dtype)
    optimizer.step()


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of a state after it was stored, by definition."""
    if dtype in (torch.float32, torch.bfloat16):
        return value.to(dtype).float()
    kind = torch.float8_e4m3fn if dtype is torch.uint8 else dtype
    largest = 448.0 if dtype is torch.uint8 else 65504.0 / 2
    scale = value.abs().max() / largest
    return (value / scale).to(kind).float() * scale


@pytest.mark.parametrize(
    ("dtypes", "capturable", "few"),
    [
        *((dtypes, False, few) for dtypes in ("bb", "hh", "uu") for few in (False, True)),
        *((dtypes, True, False) for dtypes in ("bb", "bf", "fb")),
    ],
)
def test_steps_are_those_of_rounded_states(device, monkeypatch, dtypes, capturable, few) -> None:
    if few:  # the states of one parameter are converted at a time
        monkeypatch.setattr(fused_adam, "_MOST_VALUES", 1)
    own, theirs = parameters(device), parameters(device)
    stored = dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), map(DTYPES.get, dtypes), strict=True))
    ours = FusedAdam(own, lr=0.1, capturable=capturable, **stored)
    plain = FusedAdam(theirs, lr=0.1, capturable=capturable)
    for number in range(4):
        step(ours, own, number)
        step(plain, theirs, number)
        for p, other in zip(own, theirs, strict=True):
            assert_bitwise(p.detach(), other.detach())
            for name, dtype in zip(("exp_avg", "exp_avg_sq"), stored.values(), strict=True):
                assert ours.state[p][name].dtype is dtype
                value = plain.state[other][name]
                value.copy_(rounded(value, dtype))
                assert_bitwise(ours.get_unscaled_state(p, name), value)


def test_masters_in_fp16(device) -> None:
    (weight,) = [nn.Parameter(torch.ones(4, device=device, dtype=torch.bfloat16))]
    optimizer = FusedAdam([weight], lr=1e-3, master_weights=True, master_weight_dtype=torch.float16)
    for number in range(3):
        step(optimizer, [weight], number)
    assert optimizer.state[weight]["master_param"].dtype is torch.float16
    master = optimizer.get_unscaled_state(weight, "master_param")
    assert (master != 1.0).all() and torch.equal(master.bfloat16(), weight.detach())


def test_a_master_is_its_parameter_and_the_rest(device) -> None:
    torch.manual_seed(0)
    odd = [0.0, -0.0, 1.00390625, -1.00390625, 1.01171875, 1e-40, 3e38, -65535.7]
    value = torch.cat(
        [torch.randn(500) * 10.0 ** torch.randint(-30, 30, (500,)), torch.tensor(odd)]
    )
    value = value.to(device)
    parameter, low = split_master(value)
    assert (parameter.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert_bitwise(joined_master(parameter, low), value)
    nearest = (value.double() - value.bfloat16().double()).abs()
    assert torch.equal((value.double() - parameter.double()).abs(), nearest)


@pytest.mark.parametrize("capturable", [False, True])
def test_remainders_are_masters_in_fp32(device, capturable) -> None:
    own, theirs = (parameters(device, torch.bfloat16) for _ in range(2))
    settings = {"lr": 1e-3, "master_weights": True, "capturable": capturable}
    ours = FusedAdam(own, store_param_remainders=True, **settings)
    plain = FusedAdam(theirs, **settings)
    for number in range(20):
        step(ours, own, number)
        step(plain, theirs, number)
    for p, other in zip(own, theirs, strict=True):
        assert ours.state[p]["master_param"].dtype is torch.int16
        master = ours.get_unscaled_state(p, "master_param")
        assert_bitwise(master, plain.state[other]["master_param"])
        assert torch.equal(p.detach(), split_master(master)[0])


@pytest.mark.parametrize(
    "states",
    [
        {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
        {"master_weight_dtype": torch.float16},
        {"store_param_remainders": True},
    ],
)
def test_state_dicts_are_in_fp32_and_go_on(device, states) -> None:
    own = parameters(device, torch.bfloat16)
    optimizer = FusedAdam(own, lr=0.01, master_weights=True, **states)
    for number in range(3):
        step(optimizer, own, number)
    saved = optimizer.state_dict()
    tensors = [x for state in saved["state"].values() for x in state.values()]
    assert len(tensors) == 3 * len(own) and {x.dtype for x in tensors} == {torch.float32}
    loaded = [nn.Parameter(torch.zeros_like(p)) for p in own]
    with torch.no_grad():
        for p, other in zip(own, loaded, strict=True):
            other.copy_(p)
    another = FusedAdam(loaded, master_weights=True, **states)
    another.load_state_dict(copy.deepcopy(saved))
    copied = pickle.loads(pickle.dumps(optimizer))
    for number in (3, 4):
        step(optimizer, own, number)
        step(another, loaded, number)
        step(copied, copied.param_groups[0]["params"], number)
    for p, other, third in zip(own, loaded, copied.param_groups[0]["params"], strict=True):
        assert torch.equal(p.detach(), third.detach())
        if "exp_avg_dtype" not in states or states["exp_avg_dtype"] is torch.bfloat16:
            assert torch.equal(p.detach(), other.detach())
        torch.testing.assert_close(p.detach(), other.detach())


def test_remainders_need_masters_in_fp32(device) -> None:
    """Megatron-Core always sets `store_param_remainders`."""
    (weight,) = [nn.Parameter(torch.ones(2, device=device, dtype=torch.bfloat16))]
    for more in ({}, {"master_weights": True, "master_weight_dtype": torch.float16}):
        optimizer = FusedAdam([weight], store_param_remainders=True, **more)
        step(optimizer, [weight], 0)
        dtypes = {state.dtype for state in optimizer.state[weight].values()}
        assert torch.int16 not in dtypes


def test_states_are_set_in_fp32(device) -> None:
    (weight,) = [nn.Parameter(torch.ones(2, device=device, dtype=torch.bfloat16))]
    optimizer = FusedAdam([weight], master_weights=True, store_param_remainders=True)
    value = torch.tensor([1.001, -2.003], device=device)
    optimizer.set_scaled_state(weight, "master_param", value)
    assert_bitwise(optimizer.get_unscaled_state(weight, "master_param"), value)
    assert torch.equal(weight.detach(), value.bfloat16())


def test_hooks_of_load_state_dict(device) -> None:
    """A pre-hook may replace states, also those of torch; a post-hook sees the states in fp32."""
    members = parameters(device, torch.bfloat16)
    theirs = torch.optim.AdamW(members)
    step(theirs, members, 0)
    optimizer = FusedAdam(members)

    def replace(_, saved):
        states = {
            number: {**state, "exp_avg": torch.full(state["exp_avg"].shape, 0.1)}
            for number, state in saved["state"].items()
        }
        return {**saved, "state": states}

    found = []
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(
        lambda own: found.extend(own.state[p]["exp_avg"].clone() for p in members)
    )
    optimizer.load_state_dict(theirs.state_dict())
    for member, value in zip(members, found, strict=True):
        assert_bitwise(value, torch.full(member.shape, 0.1))
        assert_bitwise(optimizer.state[member]["exp_avg"], value)
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("capturable", [False, True])
def test_weights_of_masters_that_are_not_numbers(device, capturable) -> None:
    """NaN has many bit patterns, some of which would round up to -0."""
    (weight,) = [nn.Parameter(torch.ones(4, device=device, dtype=torch.bfloat16))]
    optimizer = FusedAdam(
        [weight], master_weights=True, store_param_remainders=True, capturable=capturable
    )
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F7FFFFF, 0], dtype=torch.int32)
    optimizer.set_scaled_state(weight, "master_param", bits.view(torch.float32).to(device))
    for number in range(3):
        master = optimizer.get_unscaled_state(weight, "master_param")
        assert master.isnan().tolist() == weight.isnan().tolist() == [True, True, False, False]
        assert master.isfinite()[2] and weight.isinf()[2]  # rounded up
        step(optimizer, [weight], number)


@pytest.mark.parametrize("capturable", [False, True])
def test_remainders_of_parameters_with_other_strides(device, capturable) -> None:
    convolution = nn.Conv2d(3, 4, 2, bias=False, device=device, dtype=torch.bfloat16)
    theirs = copy.deepcopy(convolution)
    settings = {"lr": 1e-3, "master_weights": True, "capturable": capturable}
    ours = FusedAdam(convolution.parameters(), store_param_remainders=True, **settings)
    plain = FusedAdam(theirs.parameters(), **settings)
    for number in range(4):
        step(ours, list(convolution.parameters()), number)
        step(plain, list(theirs.parameters()), number)
        if number == 1:
            convolution.to(memory_format=torch.channels_last)
        master = ours.get_unscaled_state(convolution.weight, "master_param")
        assert_bitwise(master, plain.state[theirs.weight]["master_param"])
        assert torch.equal(convolution.weight, split_master(master)[0])
