"""An FP8 parameter as a tensor: what users and trainers do with parameters."""

import copy
import io
import pickle

import pytest
import torch
from fp8_kinds import KINDS, NAMES, codes, scales
from ranks import FORKED
from rulers import assert_bitwise
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.fp8.process_state import process_state
from transformer_engine.pytorch.tensor import Float8Tensor, QuantizedTensor
from transformer_engine.pytorch.tensor.quantized_tensor import _rebuild

SHAPE = (48, 160)  # two blocks


@pytest.fixture(params=KINDS, ids=NAMES)
def kind(request) -> type[QuantizedTensor]:
    return request.param


@pytest.fixture
def layer(device: str, kind: type[QuantizedTensor]) -> te.Linear:
    with te.fp8_model_init(recipe=KINDS[kind]):
        return te.Linear(160, 48, device=device, params_dtype=torch.bfloat16, name="block.proj")


def test_detach_and_data_alias_clone_and_to_copy(layer: te.Linear) -> None:
    weight = layer.weight
    for alias in (weight.detach(), weight.data):
        assert type(alias) is type(weight) and not alias.requires_grad
        alias.mul_(2)
        assert codes(alias) is codes(weight)
        assert_bitwise(alias.dequantize(), weight.dequantize())
    before = weight.dequantize()
    for twin in (weight.clone(), weight.detach().clone(), weight.to("cpu", copy=True)):
        assert type(twin) is type(weight) and twin.dtype is weight.dtype
        with torch.no_grad():
            twin.zero_()
        assert_bitwise(weight.dequantize(), before)
    assert weight.clone().grad_fn is not None
    assert type(weight.float()) is torch.Tensor and type(weight.detach()[:, 2:4]) is torch.Tensor


@pytest.mark.filterwarnings("ignore:.*which cuts blocks", "ignore:.*whole blocks")
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.detach(),
        lambda w: w.data.clone(),
        lambda w: w.view(24, 320),
        lambda w: w.view(2, 24, 160),
        lambda w: w.t(),
        lambda w: w[:16],
        lambda w: w.chunk(2)[0],
        lambda w: w.as_strided(w.shape, w.stride()),
        lambda w: w.unsqueeze(0),
    ],
)
def test_views_in_inference_mode(layer: te.Linear, view) -> None:
    weight = layer.weight
    expected = view(weight)
    with torch.inference_mode():
        found = view(weight)
    assert type(found) is type(expected)
    for one in (found, expected):  # outside of inference mode their values are equal
        assert_bitwise(one.float().detach(), expected.float().detach())
    with torch.inference_mode():
        state = layer.state_dict()
        layer.load_state_dict(state)
        again = weight.detach()
        twin = te.Linear(160, 48, device=weight.device, params_dtype=torch.bfloat16)
        twin.load_state_dict(state)
    assert codes(again) is codes(weight)
    weight.dequantize().sum().backward()


def test_a_transpose_is_not_used_after_an_alias_has_written(layer: te.Linear) -> None:
    weight = layer.weight
    if not isinstance(weight, Float8Tensor):
        pytest.skip("the other kind keeps no transpose")
    weight.transposed_codes()
    assert weight.known_transpose is not None
    weight.data.fill_(1.0)
    assert weight.known_transpose is None and weight.detach()._transpose is None
    assert_bitwise(weight.transposed_codes(), codes(weight).T.contiguous())


def test_writing_between_forward_and_backward_is_noticed(layer: te.Linear) -> None:
    x = torch.ones(16, 160, device=layer.weight.device, dtype=torch.bfloat16, requires_grad=True)
    with te.fp8_autocast(fp8_recipe=KINDS[type(layer.weight)]):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_data_may_be_set(layer: te.Linear) -> None:
    weight = layer.weight
    weight.data = torch.ones_like(weight)
    assert isinstance(weight, QuantizedTensor) and (weight.dequantize() == 1).all()
    other = weight.clone().detach().mul_(3)
    weight.data = other
    assert codes(weight) is codes(other) and (weight.dequantize() == 3).all()
    with pytest.raises(ValueError, match=r"expected data of shape.*weight of layer block.proj"):
        weight.data = torch.ones(3, device=weight.device)


def test_data_in_a_buffer_of_a_trainer_is_a_copy(
    layer: te.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ZeroRedundancyOptimizer(parameters_as_bucket_view=True)` assigns views of a buffer."""
    monkeypatch.setattr(process_state(), "announced", set())
    weight = layer.weight
    before = weight.detach().dequantize()
    bucket = torch.cat([before.flatten(), before.flatten()])
    with pytest.warns(
        UserWarning, match=r"does not reach weight of layer block.proj \(Zero"
    ) as own:
        for _ in range(2):
            weight.data = bucket[: before.numel()].view_as(before)
    assert len(own) == 1 and own[0].filename == __file__
    bucket.zero_()
    assert_bitwise(weight.detach().dequantize(), before)


@pytest.mark.parametrize("same", ["values", "memory"])
def test_other_data_may_be_set_without_a_warning(
    layer: te.Linear, same: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_state(), "announced", set())
    weight = layer.weight
    values = weight.detach().dequantize()
    weight.data = torch.stack([values, 2 * values])[1] if same == "memory" else values


def test_copying_both_ways(layer: te.Linear) -> None:
    weight = layer.weight
    plain = torch.randn(SHAPE, device=weight.device)
    with torch.no_grad():
        weight.copy_(plain)
        assert_bitwise(codes(weight), codes(weight._quantizer(plain)))
        plain.copy_(weight)
        assert_bitwise(plain, weight.dequantize(dtype=torch.float32))
        weight.copy_(torch.ones(160, device=weight.device))  # broadcast, as plain tensors do
        assert (weight.dequantize() == 1).all()
        with pytest.raises(RuntimeError, match=r"expand|shape"):
            weight.copy_(torch.ones(3, 5, device=weight.device))


def test_deepcopies_share_nothing(layer: te.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    layer.weight.mark = {"a": [1]}
    twin = copy.deepcopy(layer)
    weight = twin.weight
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert weight.mark == {"a": [1]} and weight.mark is not layer.weight.mark
    assert weight.partition_dim == 0 and weight.grad is None  # as in copies of plain parameters
    assert_bitwise(codes(weight), codes(layer.weight))
    before = layer.weight.dequantize()
    with torch.no_grad():
        weight.zero_()
    assert_bitwise(layer.weight.dequantize(), before)
    frozen = copy.deepcopy(layer.requires_grad_(False))
    assert not frozen.weight.requires_grad


def test_modules_move_and_change_dtype(layer: te.Linear, device: str) -> None:
    weight = layer.weight
    before = codes(weight).clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    weight.grad = torch.ones_like(weight)
    for change, dtype in (
        (layer.float, torch.float32),
        (layer.half, torch.float16),
        (lambda: layer.to(torch.bfloat16), torch.bfloat16),
        (lambda: layer.to("cpu", torch.float32), torch.float32),
        (lambda: layer.to(device), torch.float32),
    ):
        change()
        assert layer.weight is weight and weight.dtype is dtype and weight.grad.dtype is dtype
        assert isinstance(weight, QuantizedTensor) and isinstance(weight, torch.nn.Parameter)
        assert scales(weight).dtype is torch.float32 and weight.partition_dim == 0
        assert_bitwise(codes(weight), before)
    assert list(layer._parameters) == ["weight", "bias"]
    optimizer.step()
    assert not torch.equal(codes(weight), before)
    with pytest.raises(TypeError, match=r"float64.*|weight of layer block.proj, got torch.float64"):
        layer.double()


def test_a_module_of_torch_that_shares_a_weight_says_who_converts_it(layer: te.Linear) -> None:
    tied = torch.nn.Embedding(48, 160, device=layer.weight.device)
    tied.weight = layer.weight
    model = torch.nn.ModuleList([tied, layer])
    with pytest.raises(ValueError, match=r"weight of layer block\.proj.*torch module that shares"):
        model.half()
    layer.half()
    model.half()
    assert tied.weight is layer.weight and tied.weight.dtype is torch.float16


def test_hooks_stay_when_the_dtype_changes(layer: te.Linear) -> None:
    weight, seen = layer.weight, []
    doubled = weight.register_hook(lambda grad: 2 * grad)
    recorded = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))

    def gradient() -> float:
        weight.grad = None
        weight.dequantize().sum().backward()
        return weight.grad[0, 0].item()

    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        layer.to(dtype)
        assert gradient() == 2 and seen == [True]
        seen.clear()
    doubled.remove()
    recorded.remove()
    assert gradient() == 1 and not seen


@pytest.mark.filterwarnings("ignore:.*which cuts blocks")
def test_vectors_and_clipping(layer: te.Linear) -> None:
    vector = parameters_to_vector(layer.parameters())
    assert type(vector) is torch.Tensor and vector.shape == (48 * 161,)
    vector_to_parameters(torch.full_like(vector, 2.0), layer.parameters())
    assert isinstance(layer.weight, QuantizedTensor) and (layer.weight.dequantize() == 2).all()
    layer.weight.grad = torch.full_like(layer.weight, 3.0)
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    torch.nn.utils.clip_grad_value_(layer.parameters(), 1e-4)
    assert layer.weight.grad.abs().max() <= 1e-4
    norms = torch._foreach_norm(list(layer.parameters()))
    torch.testing.assert_close(norms[0], layer.weight.dequantize().norm())


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.detach().numpy(),
        lambda w: w.detach().storage(),  # as safetensors does
        lambda w: torch.from_dlpack(w.detach()),
        lambda w: w.share_memory_(),
        lambda w: w.detach().resize_(3),
        lambda w: w.detach().set_(torch.ones(2, dtype=w.dtype)),
        lambda w: w.detach().view(torch.uint8),
    ],
)
def test_what_needs_storage_is_refused_by_name(layer: te.Linear, use, device: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"weight of layer block\.proj"):
        use(layer.weight)


def test_native_code_gets_no_address(layer: te.Linear) -> None:
    for use in (torch.utils.dlpack.to_dlpack, torch.Tensor.data_ptr):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            use(layer.weight.detach())


@pytest.mark.filterwarnings("ignore:.*which cuts blocks")
def test_collectives_are_refused_by_name(tmp_path, kind) -> None:
    """A collective would read and write temporary values, and would not change the weight."""
    with te.fp8_model_init(recipe=KINDS[kind]):
        layer = te.Linear(32, 32, device="cpu", name="block.proj")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for collective in (torch.distributed.broadcast, torch.distributed.all_reduce):
            options = {"src": 0} if collective is torch.distributed.broadcast else {}
            with pytest.raises(TypeError, match=r"torch\.distributed.*weight of layer block\.proj"):
                collective(layer.weight.data, **options)
        wrapped = torch.nn.parallel.DistributedDataParallel(layer)
        with te.fp8_autocast(fp8_recipe=KINDS[kind]):
            wrapped(torch.randn(16, 32)).sum().backward()
        # If its reducer is freed after the group, it waits for threads that need the GIL.
        del wrapped
    finally:
        torch.distributed.destroy_process_group()
    assert layer.weight.grad.abs().sum() > 0


def test_fake_and_meta_tensors_have_a_repr(device: str, kind: type[QuantizedTensor]) -> None:
    shown = f"{kind.__name__}(size=(32, 32)"
    with torch._subclasses.fake_tensor.FakeTensorMode():
        with te.fp8_model_init(recipe=KINDS[kind]):
            layer = te.Linear(32, 32, device=device)
        assert shown in repr(layer.weight)
        assert layer.weight.float().shape == (32, 32)
        with te.fp8_autocast(fp8_recipe=KINDS[kind] or Float8CurrentScaling()):
            assert layer(torch.empty(16, 32, device=device)).shape == (16, 32)
    with te.fp8_model_init(recipe=KINDS[kind]):
        assert shown in repr(te.Linear(32, 32, device="meta").weight)


def test_messages_follow_the_name_of_the_layer(layer: te.Linear) -> None:
    layer.name = "renamed"
    with pytest.raises(TypeError, match="weight of layer renamed"):
        layer.weight.detach().numpy()


def test_copies_have_names_of_their_own(layer: te.Linear) -> None:
    twin = copy.deepcopy(layer)
    other = te.Linear(160, 48, device=layer.weight.device)
    other.weight = torch.nn.Parameter(layer.weight.detach().clone())
    layer.name, twin.name, other.name = "first", "second", "third"
    labels = [module.weight.label for module in (layer, twin, other)]
    assert labels == [f"weight of layer {name}" for name in ("first", "second", "third")]


def test_pickled_modules_keep_fp8_weights(layer: te.Linear) -> None:
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    weight = torch.load(file, weights_only=True)
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    assert_bitwise(codes(weight), codes(layer.weight))
    with torch.no_grad():
        weight.fill_(7.0)  # the loaded weight has its quantizer
    assert (weight.dequantize() == 7).all()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    whole = torch.load(file, weights_only=False)
    assert type(whole.weight) is type(layer.weight)
    assert_bitwise(codes(whole.weight), codes(layer.weight))


def test_pickles_keep_what_parameters_carry(kind: type[QuantizedTensor]) -> None:
    with te.fp8_model_init(recipe=KINDS[kind], preserve_high_precision_init_val=True):
        layer = te.Linear(160, 48, device="cpu", parallel_mode="column")
    layer.weight.main_grad = torch.ones(SHAPE)
    layer.weight.mark = {"a": [1]}
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    copies = [torch.load(file, weights_only=True), pickle.loads(pickle.dumps(layer)).weight]
    for weight in copies:
        assert weight.tensor_model_parallel and weight.partition_dim == 0
        assert weight.mark == {"a": [1]}
        assert_bitwise(weight.main_grad, layer.weight.main_grad)
        expected = layer.weight.get_high_precision_init_val()
        assert_bitwise(weight.get_high_precision_init_val(), expected)
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
        assert layer.weight.get_high_precision_init_val() is expected
    kind, shape, parts, facts, needs_grad, _ = layer.weight.__reduce_ex__(2)[1]
    # Files of older versions have only these arguments.
    old = _rebuild(kind, shape, parts, facts, needs_grad)
    assert_bitwise(codes(old), codes(layer.weight))


def test_processes_share_fp8_weights(kind: type[QuantizedTensor]) -> None:
    recipe = KINDS[kind] or Float8CurrentScaling()
    with te.fp8_model_init(recipe=recipe):
        layer = te.Linear(160, 48, device="cpu")
    layer.share_memory()
    assert all(part.is_shared() for part in layer.weight.parts if part is not None)
    if isinstance(layer.weight, Float8Tensor):  # no cached transpose: it would become stale
        layer.weight.update_usage(columnwise_usage=True)
        assert layer.weight._transpose is None
    x = torch.randn(16, 160, requires_grad=True)
    for value in (None, 1.0, 3.0):
        if value is not None:
            process = FORKED.Process(target=torch.nn.init.constant_, args=(layer.weight, value))
            process.start()
            process.join()
            assert (layer.weight.dequantize() == value).all()
        x.grad = None
        with te.fp8_autocast(fp8_recipe=recipe):
            layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 48 * 3.0))


def test_repeated_operands_and_results(layer: te.Linear) -> None:
    weight = layer.weight.detach()
    before = weight.dequantize(dtype=torch.float32)
    same = weight.mul_(weight)
    assert same is weight
    expected = weight._quantizer((before * before).bfloat16())
    torch.testing.assert_close(weight.dequantize(), expected.dequantize())
    out = weight.clone()
    torch.add(weight, 1.0, out=out)
    assert type(out) is type(weight)
    torch.testing.assert_close(out.dequantize(), weight.dequantize() + 1, rtol=0.07, atol=0.02)
