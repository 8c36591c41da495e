"""Optimizers and functions of lists of tensors, against torch where torch has them."""

import copy
import pickle

import pytest
import torch
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import (
    FusedAdam,
    FusedSGD,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def parameters(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(5, 7), (3,), (), (0, 4)]
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in shapes]


def train(optimizer, own, steps=4, attribute="grad"):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in own:
            gradient = torch.randn(p.shape, generator=generator)
            setattr(p, attribute, gradient.to(p.device, p.dtype))
        optimizer.step()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fp32_parameters_take_the_steps_of_torch(adam_w_mode, device):
    ours, theirs = parameters(device), parameters(device)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    train(FusedAdam(ours, adam_w_mode=adam_w_mode, **SETTINGS), ours)
    train(kind(theirs, fused=True, **SETTINGS), theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_bitwise(one.detach(), other.detach())


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_computed_in_fp32(dtype, masters, device):
    """Masters equal fp32 parameters; without masters, each step starts from rounded values."""
    own = parameters(device, dtype)
    wide = [nn.Parameter(p.detach().float()) for p in own]
    optimizer = FusedAdam(own, master_weights=masters, **SETTINGS)
    reference = torch.optim.AdamW(wide, fused=True, **SETTINGS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p, w in zip(own, wide, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
            w.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, w in zip(own, wide, strict=True):
            assert_bitwise(p.detach(), w.detach().to(dtype))
            if not masters:
                w.data.copy_(p)
    for p, w in zip(own, wide, strict=True):
        state = optimizer.state[p]
        assert {t.dtype for t in state.values()} == {torch.float32}
        assert_bitwise(state["exp_avg_sq"], reference.state[w]["exp_avg_sq"])
        if masters:
            assert_bitwise(state["master_param"], w.detach())


def test_parameters_kept_in_fp8_follow_their_masters(device):
    torch.manual_seed(0)
    with te.fp8_model_init(preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32, bias=False, device=device)
    start = layer.weight.get_high_precision_init_val().to(device)
    optimizer = FusedAdam(layer.parameters(), lr=1e-5, master_weights=True)
    wide = nn.Parameter(start.clone())
    train(optimizer, [layer.weight])
    train(torch.optim.AdamW([wide], lr=1e-5, weight_decay=0.0, fused=True), [wide])
    assert_bitwise(optimizer.state[layer.weight]["master_param"], wide.detach())
    assert layer.weight.get_high_precision_init_val() is None
    made = layer.weight._quantizer(wide.detach())
    assert_bitwise(layer.weight._data, made._data)


@pytest.mark.parametrize("master_weights", [True, False])
def test_loading_leaves_values_before_the_cast_to_the_first_step(master_weights: bool):
    with te.fp8_model_init(preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32, bias=False, device="cpu")
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(32, 32))])
    train(plain, plain.param_groups[0]["params"])
    optimizer = FusedAdam(layer.parameters(), master_weights=master_weights)
    optimizer.load_state_dict(plain.state_dict())
    assert layer.weight.get_high_precision_init_val() is not None
    assert set(optimizer.state[layer.weight]) == {"exp_avg", "exp_avg_sq"}


def test_masters_of_fp8_parameters_are_fp32():
    with te.fp8_model_init():
        layer = te.Linear(32, 32, bias=False, device="cpu", params_dtype=torch.float32)
    start = layer.weight.dequantize()
    optimizer = FusedAdam(layer.parameters(), lr=1e-5, master_weights=True)
    wide = nn.Parameter(start.clone())
    train(optimizer, [layer.weight])
    train(torch.optim.AdamW([wide], lr=1e-5, weight_decay=0.0, fused=True), [wide])
    assert_bitwise(optimizer.state[layer.weight]["master_param"], wide.detach())


def test_fp8_parameters_need_masters():
    with te.fp8_model_init():
        layer = te.Linear(32, 32, device="cpu")
    layer.weight.grad = torch.ones(32, 32)
    with pytest.raises(RuntimeError, match=r"expected master_weights=True for .* FP8"):
        FusedAdam(layer.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_runs_take_the_same_steps(dtype):
    own = parameters(dtype=dtype)
    optimizer = FusedAdam(own, master_weights=True, **SETTINGS)
    train(optimizer, own)
    again = [nn.Parameter(p.detach().clone()) for p in own]
    resumed = FusedAdam(again, master_weights=True)
    state = copy.deepcopy(optimizer.state_dict())
    assert [group["step"] for group in state["param_groups"]] == [4]
    resumed.load_state_dict(state)
    train(optimizer, own)
    train(resumed, again)
    for one, other in zip(own, again, strict=True):
        assert_bitwise(one.detach(), other.detach())
    assert {t.dtype for s in resumed.state.values() for t in s.values()} == {torch.float32}


def test_states_that_programs_make_themselves():
    """Megatron creates the moments before the first step, and counts steps in the group."""
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours)
    for p in ours:
        optimizer.state[p]["exp_avg"] = torch.zeros_like(p.data)
        optimizer.state[p]["exp_avg_sq"] = torch.zeros_like(p.data)
    train(optimizer, ours)
    train(FusedAdam(theirs), theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_bitwise(one.detach(), other.detach())
    p = ours[0]
    optimizer.set_scaled_state(p, "exp_avg", torch.ones(5, 7, dtype=torch.bfloat16))
    assert_bitwise(optimizer.get_unscaled_state(p, "exp_avg"), torch.ones(5, 7))


def test_groups_gradients_elsewhere_and_closures():
    first, second, *_ = parameters()
    groups = [{"params": [first]}, {"params": [second], "lr": 0.0}]
    optimizer = FusedAdam(groups, lr=0.1, use_decoupled_grad=True)
    before = first.detach().clone(), second.detach().clone()
    train(optimizer, [first, second], attribute="decoupled_grad")
    assert first.grad is None and not torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert optimizer.step(torch.is_grad_enabled) is True
    second.decoupled_grad = None
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [6, 6]


def test_sgd_is_that_of_torch(device):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    ours, theirs = parameters(device), parameters(device)
    train(FusedSGD(ours, **settings), ours)
    train(torch.optim.SGD(theirs, fused=True, **settings), theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_bitwise(one.detach(), other.detach())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), NotImplementedError, "amsgrad=False, the only"),
        (
            lambda p: FusedAdam(p, exp_avg_dtype=torch.int8),
            ValueError,
            "exp_avg_dtype in .torch.float32, .*, got torch.int8",
        ),
        (
            lambda p: FusedAdam(p, master_weight_dtype=torch.bfloat16),
            ValueError,
            "master_weight_dtype in .torch.float32, torch.float16., got torch.bfloat16",
        ),
        (
            lambda p: FusedAdam(p, exp_avg_sq_dtype=torch.float16, capturable=True),
            NotImplementedError,
            "torch.bfloat16 with capturable=True, got torch.float16 for exp_avg_sq",
        ),
        (lambda p: FusedAdam(p, set_grad_none=False), NotImplementedError, "set_grad_none=True"),
        (lambda p: FusedAdam(p, lr=-1.0), ValueError, "lr, eps and weight_decay of 0 or more"),
        (lambda p: FusedAdam(p, lr="1e-3"), TypeError, "lr to be a number, got '1e-3'"),
        (lambda p: FusedAdam(p, eps=None), TypeError, "eps to be a number, got None"),
        (lambda p: FusedAdam(p, betas=(1.0, 0.9)), ValueError, r"betas in \[0, 1\)"),
        (lambda p: FusedAdam([{"params": p, "lr": -1.0}]), ValueError, "lr, eps and weight_decay"),
        (lambda p: FusedAdam([{"params": p, "maximize": True}]), NotImplementedError, "maximize"),
        (
            lambda p: FusedAdam(p).step(grad_factor=0.5),
            TypeError,
            "one value on the device, got 0.5",
        ),
        (lambda p: FusedSGD(p, 0.1, wd_after_momentum=True), NotImplementedError, "FusedSGD"),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=rf"^\[Fused\w+\] expected .*{message}|\[{message}\]"):
        make(parameters())


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="expected dense gradients"):
        FusedAdam(table.parameters()).step()


@pytest.mark.gpu
def test_capture_is_refused():
    own = parameters("cuda")
    optimizer = FusedAdam(own)
    train(optimizer, own)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="expected capturable=True in a CUDA graph capture"),
        torch.cuda.graph(graph),
    ):
        own[0].grad.mul_(2)  # torch warns about empty graphs
        optimizer.step()


def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("pair", ["fp32 fp32", "fp16 fp32", "fp32 bf16", "bf16 bf16"])
def test_scaled_lists(pair, device):
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    kind, wanted = (kinds[name] for name in pair.split())
    inputs = [p.detach() for p in parameters(device, kind)]
    outputs = [torch.empty_like(x, dtype=wanted) for x in inputs]
    found = flag(device)
    multi_tensor_applier(multi_tensor_scale, found, [inputs, outputs], 3.0)
    for x, y in zip(inputs, outputs, strict=True):
        assert_bitwise(y, (x.float() * 3.0).to(wanted))
    assert found.item() == 0
    factor = torch.tensor([0.5], device=device)
    for op in (multi_tensor_scale, multi_tensor_scale_tensor):
        halves = [(y.float() * 0.5).to(wanted) for y in outputs]
        multi_tensor_applier(op, found, [outputs, outputs], factor)
        for y, half in zip(outputs, halves, strict=True):
            assert_bitwise(y, half)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_scaling_tells_of_what_is_not_finite(value, device):
    tensors = [torch.ones(3, device=device), torch.tensor([1.0, value], device=device)]
    found = flag(device)
    multi_tensor_applier(multi_tensor_scale, found, [tensors, tensors], 0.5)
    assert found.item() == 1 and tensors[0][0] == 0.5
    multi_tensor_applier(multi_tensor_scale, found, [tensors[:1], tensors[:1]], 2.0)
    assert found.item() == 1  # it is never cleared: other calls may have set it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_lists(dtype, device):
    tensors = [p.detach() for p in parameters(device, dtype)]
    norm, each = multi_tensor_applier(multi_tensor_l2norm, flag(device), [tensors], True)
    expected = torch.cat([t.double().flatten() for t in tensors]).norm()
    torch.testing.assert_close(norm, expected[None].float())
    assert norm.dtype is torch.float32 and each.shape == (3,)  # one is empty
    assert multi_tensor_applier(multi_tensor_l2norm, flag(device), [tensors])[1].numel() == 0
    assert multi_tensor_applier(multi_tensor_l2norm, flag(device), [[]])[0].item() == 0.0


def test_norm_of_a_large_tensor(device):
    large = torch.full((1 << 22,), 0.1, device=device)
    norm, _ = multi_tensor_applier(multi_tensor_l2norm, flag(device), [[large]])
    torch.testing.assert_close(norm.item(), 0.1 * 2**11, rtol=1e-6, atol=0.0)


def test_lists_of_several_lengths_are_refused():
    with pytest.raises(ValueError, match=r"expected lists of one length, got \[1, 0\]"):
        multi_tensor_applier(multi_tensor_scale, flag("cpu"), [[torch.ones(1)], []], 1.0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"exp_avg": torch.zeros(1)}, r"expected shape \(5, 7\) for exp_avg of parameter 0, got"),
        (torch.zeros(5, 7), "expected a dict as the state of parameter 0, got Tensor"),
        ({"exp_avg": [1.0]}, "expected exp_avg of parameter 0 to be a tensor, got list"),
    ],
)
def test_damaged_states_are_refused(state, message):
    own = parameters()
    optimizer = FusedAdam(own)
    train(optimizer, own, 1)
    saved = optimizer.state_dict()
    saved["state"][0] = state
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def strided(shape, seed):
    """Values with the strides of a transpose, and with gaps."""
    torch.manual_seed(seed)
    rows, columns = shape
    return torch.randn(columns, rows).t(), torch.randn(rows, 2 * columns)[:, ::2]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_of_parameters_and_gradients_change_nothing(dtype, capturable, device):
    own = [nn.Parameter(x.to(device, dtype)) for x in (*strided((5, 7), 0), torch.ones(5, 7))]
    assert dtype is not torch.float32 or not own[0].is_contiguous()
    plain = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in own]
    settings = {**SETTINGS, "capturable": capturable}
    optimizers = FusedAdam(own, **settings), FusedAdam(plain, **settings)
    for seed in range(3):
        gradients = [x.to(device, dtype) for x in (torch.randn(5, 7), *strided((5, 7), seed))]
        for p, q, gradient in zip(own, plain, gradients, strict=True):
            p.grad = torch.empty_strided(p.shape, gradient.stride(), dtype=dtype, device=device)
            p.grad.copy_(gradient)
            q.grad = gradient.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(own, plain, strict=True):
        assert_bitwise(p.detach().contiguous(), q.detach())


def test_sgd_steps_parameters_of_any_strides(device):
    own = [nn.Parameter(x.to(device)) for x in strided((5, 7), 0)]
    plain = [nn.Parameter(p.detach().contiguous()) for p in own]
    optimizer = FusedSGD(own[:1], lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": own[1:]})
    train(optimizer, own)
    train(torch.optim.SGD(plain, lr=0.1, momentum=0.9), plain)
    for p, q in zip(own, plain, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_step_as_the_optimizer_does(make):
    own = parameters(dtype=torch.bfloat16)
    optimizer = FusedAdam(own, adam_w_mode=False, master_weights=True, **SETTINGS)
    train(optimizer, own, 2)
    other = make(optimizer)
    copies = other.param_groups[0]["params"]
    train(optimizer, own)
    train(other, copies)
    for p, q in zip(own, copies, strict=True):
        assert_bitwise(p.detach(), q.detach())


@pytest.mark.parametrize("capturable", [False, True])
def test_states_of_torch_are_taken_over(capturable):
    theirs = parameters()
    reference = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    train(reference, theirs)
    own = [nn.Parameter(p.detach().clone()) for p in theirs]
    optimizer = FusedAdam(own, capturable=capturable)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(reference, theirs)
    train(optimizer, own)
    for p, q in zip(own, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    saved = reference.state_dict()
    saved["state"][1]["step"] = torch.tensor(2.0)
    with pytest.raises(ValueError, match=r"expected .* equally many steps, got 2, 8"):
        optimizer.load_state_dict(saved)
    saved = torch.optim.AdamW(theirs, amsgrad=True).state_dict()
    with pytest.raises(NotImplementedError, match="amsgrad=False"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_without_gradients_count_their_steps(capturable):
    own = parameters()
    optimizer = FusedAdam([{"params": own[:2]}, {"params": own[2:]}], capturable=capturable)
    train(optimizer, own[:2])
    assert [int(group["step"]) for group in optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_elsewhere_are_cleared(to_none):
    own = parameters()
    optimizer = FusedAdam(own, use_decoupled_grad=True)
    train(optimizer, own[:1], 1, "decoupled_grad")
    optimizer.zero_grad(to_none)
    left = own[0].decoupled_grad
    assert left is None if to_none else not left.any()
    assert getattr(own[1], "decoupled_grad", None) is None
