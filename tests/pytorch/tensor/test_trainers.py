"""Quantised tensors as trainers use them: usages, flags, pieces, gradients, pieces of masters."""

import pytest
import torch
import torch.distributed as dist
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.dtypes import DType
from transformer_engine.pytorch.optimizers import parts
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)
from transformer_engine.pytorch.tensor.utils import (
    _largest,
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    replace_raw_data,
)

E4M3 = DType.kFloat8E4M3


def blocks(dimensions):
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions)


KINDS = {
    "delayed": lambda d: Float8Quantizer(
        torch.full((1,), 4.0, device=d), torch.zeros(1, device=d), E4M3
    ),
    "current": lambda d: Float8CurrentScalingQuantizer(E4M3),
    "rows": lambda d: blocks(1),
    "squares": lambda d: blocks(2),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def values(device, *shape, dtype=torch.float32):
    torch.manual_seed(4)
    return torch.randn(*shape, device=device).to(dtype)


@every_kind
def test_room_to_write_into(kind, device):
    quantizer, x = KINDS[kind](device), values(device, 256, 128)
    room = quantizer.make_empty((256, 128), dtype=torch.bfloat16, device=device, requires_grad=True)
    made = quantizer(x.bfloat16())
    assert (room.shape, room.dtype, room.device) == (made.shape, made.dtype, made.device)
    assert room.requires_grad and not room.dequantize().any()
    with torch.no_grad():
        quantizer.update_quantized(x, room)
    assert_bitwise(room.dequantize(), quantizer(x, dtype=torch.bfloat16).dequantize())
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    other = quantizer.copy()
    other.set_usage(columnwise=False)
    assert quantizer.columnwise_usage and not other.columnwise_usage
    for one, two in zip(quantizer.multi_quantize([x, 2 * x]), (x, 2 * x), strict=True):
        assert_bitwise(one.dequantize(), quantizer(two).dequantize())


@every_kind
def test_a_flag_keeps_what_was_there(kind, device):
    quantizer, x = KINDS[kind](device), values(device, 128, 128)
    tensor = quantizer(x)
    recorded = [t.clone() for t in quantizer.persistent_tensors()]
    before = [part.clone() for part in tensor.parts if part is not None]
    flag = torch.ones(1, dtype=torch.float32, device=device)
    tensor.quantize_(3 * x, noop_flag=flag)
    for part, old in zip([p for p in tensor.parts if p is not None], before, strict=True):
        assert_bitwise(part, old)
    for now, old in zip(quantizer.persistent_tensors(), recorded, strict=True):
        assert torch.equal(now, old), "no amax of values that were not written"
    tensor.quantize_(3 * x, noop_flag=flag.zero_())
    assert_bitwise(tensor.dequantize(), quantizer(3 * x).dequantize())


@every_kind
def test_gradients_pass(kind, device):
    quantizer, x = KINDS[kind](device), values(device, 128, 128).requires_grad_()
    tensor = quantizer(x)
    assert tensor.requires_grad
    out = tensor.dequantize()
    assert_bitwise(out, quantizer(x.detach()).dequantize())
    upstream = values(device, 128, 128)
    (out * 2).backward(upstream)
    assert torch.equal(x.grad, 2 * upstream)
    with torch.no_grad():
        assert not quantizer(x).requires_grad
    parameter = torch.nn.Parameter(quantizer(x.detach()))
    (parameter.dequantize(dtype=torch.float16) * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full_like(x, 2.0))


@every_kind
def test_vectors(kind, device):
    quantizer, x = KINDS[kind](device), values(device, 200)
    tensor = quantizer(x)
    matrix = quantizer(x[None])
    assert tensor.shape == x.shape
    assert_bitwise(tensor.dequantize(), matrix.dequantize()[0])
    tensor.quantize_(2 * x)
    assert_bitwise(tensor.dequantize(), quantizer(2 * x).dequantize())


def test_usages_of_one_scale(device):
    tensor = Float8CurrentScalingQuantizer(E4M3, columnwise=False)(values(device, 32, 48))
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
    tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    assert torch.equal(tensor._transpose, tensor._data.t())
    tensor.update_usage(columnwise_usage=False)
    assert tensor._transpose is None
    assert tensor.get_data_tensors() == tensor.parts


@pytest.mark.parametrize("shape", [(256, 384), (130, 200)], ids=str)
def test_usages_of_blocks(shape, device):
    x = values(device, *shape)
    both = blocks(2)(x)
    one = blocks(2)(x)
    one.update_usage(columnwise_usage=False)
    assert one.get_usages() == {"rowwise": True, "columnwise": False}
    one.update_usage(columnwise_usage=True)
    assert_bitwise(one._columnwise_data, both._columnwise_data)
    assert_bitwise(one.side(True).scales, both.side(True).scales)
    one.update_usage(rowwise_usage=False)
    one.update_usage(rowwise_usage=True)
    assert_bitwise(one.dequantize(), both.dequantize())
    rows = blocks(1)(x)
    rows.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="expected column-wise codes at hand, got none"):
        rows.update_usage(columnwise_usage=True)
    with pytest.raises(RuntimeError, match="to stay, got neither"):
        rows.update_usage(rowwise_usage=False)


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_pieces_along_rows(kind, device):
    """They share the codes, and can only be read."""
    quantizer, x = KINDS[kind](device), values(device, 48, 32)
    tensor = quantizer(x)
    for pieces in (tensor.chunk(3), tensor.split(16)):
        assert [type(piece) for piece in pieces] == [Float8Tensor] * 3
        assert_bitwise(torch.cat([p.dequantize() for p in pieces]), tensor.dequantize())
        assert pieces[1]._data.data_ptr() == tensor._data.data_ptr() + 16 * 32
        with pytest.raises(RuntimeError, match="expected a quantizer to write with"):
            pieces[0].quantize_(x[:16])
    assert type(tensor.split(16, 1)[0]) is torch.Tensor


@every_kind
def test_data_of_a_parameter(kind, device):
    quantizer, x = KINDS[kind](device), values(device, 128, 128)
    parameter = torch.nn.Parameter(quantizer(x))
    parameter.data = quantizer(2 * x)
    assert_bitwise(parameter.dequantize(), quantizer(2 * x).dequantize())
    parameter.data = 3 * x
    assert_bitwise(parameter.dequantize(), quantizer(3 * x).dequantize())
    assert isinstance(parameter.data, Float8Tensor | Float8BlockwiseQTensor)


# ---- Pieces of masters ----


@pytest.mark.parametrize("is_view", [False, True])
def test_codes_move_into_a_buffer(is_view, device):
    x, buffer = values(device, 16, 32), torch.empty(600, dtype=torch.uint8, device=device)
    tensor = Float8CurrentScalingQuantizer(E4M3)(x)
    tensor = tensor.view(16, 32) if is_view else tensor
    before, transposed = tensor.dequantize(), tensor.transposed_codes().clone()
    replace_raw_data(tensor, buffer[40 : 40 + 512].view(16, 32))
    assert_bitwise(tensor.dequantize(), before)
    assert tensor._data.data_ptr() == buffer.data_ptr() + 40
    assert torch.equal(tensor.transposed_codes(), transposed)
    buffer[41] = 0  # changes the version of the buffer
    assert tensor.transposed_codes()[1, 0] == 0
    buffer.data[40] = 0  # as an all-gather, which leaves the version of the buffer as it is
    assert tensor.transposed_codes()[0, 0] != 0
    post_all_gather_processing([tensor])
    assert tensor.transposed_codes()[0, 0] == 0
    for wrong in (buffer[:512], torch.empty(16, 32, device=device)):
        with pytest.raises(ValueError, match=r"expected uint8 \(16, 32\)"):
            replace_raw_data(tensor, wrong)
    with pytest.raises(TypeError, match="a quantised tensor, got Tensor"):
        replace_raw_data(x, buffer)


@pytest.mark.parametrize("kind", ["delayed", "current", "weights", "squares", "block weights"])
def test_pieces_of_masters_give_the_weight(kind, device, monkeypatch):
    """Two ranks with uneven pieces, one without any of the second weight, as in a single cast."""
    in_blocks = kind in ("squares", "block weights")
    shapes = [(144, 272), (256, 128)] if in_blocks else [(16, 48), (32, 32)]
    masters = [values(device, *shape) * (i + 1) for i, shape in enumerate(shapes)]
    sizes = [master.numel() for master in masters]
    cuts = [(0, 301 if not in_blocks else 130 * 272 + 129, sizes[0]), (0, sizes[1], sizes[1])]

    def weights():
        if "weights" not in kind:
            return [KINDS[kind](device)(torch.zeros_like(m)) for m in masters]
        with te.quantized_model_init(recipe=Float8BlockScaling() if in_blocks else None):
            layers = [te.Linear(s[1], s[0], device=device, bias=False) for s in shapes]
        return [layer.weight for layer in layers]

    expected = weights()
    with torch.no_grad():
        for weight, master in zip(expected, masters, strict=True):
            weight.quantize_(master)
    whole = torch.cat([_largest(w, m, 0) for w, m in zip(expected, masters, strict=True)])
    if not in_blocks:
        assert torch.equal(whole, torch.stack([m.abs().max() for m in masters]))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda t, op, group: t.copy_(torch.maximum(t, whole)))
    ranks = [weights(), weights()]
    with torch.no_grad():
        for rank, own in enumerate(ranks):
            pieces = [
                m.flatten()[c[rank] : c[rank + 1]] for m, c in zip(masters, cuts, strict=True)
            ]
            pieces = [p if p.numel() else None for p in pieces]
            cast_master_weights_to_fp8(own, pieces, [c[rank] for c in cuts], None)
    data, scale = ("_rowwise_data", "_rowwise_scale_inv") if in_blocks else ("_data", "_scale_inv")
    for i, weight in enumerate(expected):
        codes = [getattr(own[i], data).flatten() for own in ranks]
        cut = cuts[i][1]
        gathered = torch.cat([codes[0][:cut], codes[1][cut:]])
        assert_bitwise(gathered, getattr(weight, data).flatten())
        for own in ranks:
            assert_bitwise(getattr(own[i], scale), getattr(weight, scale))
            getattr(own[i], data).view(-1).copy_(gathered)
            post_all_gather_processing([own[i]])
            assert_bitwise(own[i].dequantize(), weight.dequantize())
            assert own[i].get_usages() == weight.get_usages()
            if kind == "squares":
                assert_bitwise(own[i]._columnwise_data, weight._columnwise_data)
                assert_bitwise(own[i]._columnwise_scale_inv, weight._columnwise_scale_inv)
            if kind == "delayed":
                assert own[i]._quantizer.amax == whole[i]


@pytest.mark.parametrize("recipe", [Float8BlockScaling, Float8CurrentScaling])
def test_masters_and_state_dicts_under_any_default_dtype(recipe, device, default_dtype):
    with te.quantized_model_init(recipe=recipe()):
        layer = te.Linear(128, 256, device=device, params_dtype=torch.float32)
    before = layer.weight.dequantize()
    cast_master_weights_to_fp8([layer.weight], [before.flatten().float()], [0], None)
    assert_bitwise(layer.weight.dequantize(), before)
    layer.load_state_dict(layer.state_dict())
    assert_bitwise(layer.weight.dequantize(), before)
    pieces = _largest(layer.weight, None, 0)
    assert pieces.dtype is torch.float32


def test_masters_of_a_weight_whose_scale_has_no_axes(device):
    """Programs make such scales by `torch.tensor(1.0)`."""
    q = Float8CurrentScalingQuantizer(E4M3)(values(device, 16, 32))
    scale = torch.ones((), device=device)
    weight = te.Float8Tensor(q.shape, q.dtype, q._data, scale, q._fp8_dtype)
    master = torch.full((512,), 3.0, device=device)
    cast_master_weights_to_fp8([weight], [master], [0], None)
    assert scale.shape == () and scale == 3.0 / 448.0
    assert_bitwise(weight.dequantize(), torch.full_like(weight.dequantize(), 3.0))


def test_refused_masters(device):
    weight = Float8CurrentScalingQuantizer(E4M3)(values(device, 16, 16))
    piece = torch.zeros(200, device=device)
    with pytest.raises(ValueError, match=r"a piece of 256 values .* got 200 from 100 on"):
        cast_master_weights_to_fp8([weight], [piece], [100], None)
    with pytest.raises(TypeError, match="got Float8BlockwiseQTensor of 1 x 128 blocks"):
        cast_master_weights_to_fp8([blocks(1)(values(device, 16, 16))], [piece], [0], None)
    with te.fp8_model_init():
        layer = te.Linear(16, 16, device=device)
    layer.name = "head"
    message = r"a piece of weight of layer head: trainers that shard .* quantized_model_init"
    with pytest.raises(NotImplementedError, match=message):
        cast_master_weights_to_fp8([weight, layer.weight], [piece] * 2, [0] * 2, None, [None, 1])
    cast_master_weights_to_fp8([], [], [], None)


def a_weight(device, *shape):
    torch.manual_seed(6)
    options = {"params_dtype": torch.bfloat16, "device": device}
    with te.fp8_model_init(recipe=Float8CurrentScaling()):
        return te.Linear(shape[1], shape[0], bias=False, **options).weight.detach()


def shards_of(weight, border):
    """Slices of a weight without autograd, as Megatron's distributed optimizer cuts it."""
    flat = weight.detach().view(-1)
    return [flat[:border], flat[border:]]


def stepped(optimizer, shards, count, decoupled=True):
    name = "decoupled_grad" if decoupled else "grad"
    for step in range(count):
        for i, shard in enumerate(shards):
            torch.manual_seed(10 * step + i)
            setattr(
                shard, name, torch.randn(shard.shape, device=shard.device, dtype=torch.bfloat16)
            )
        optimizer.step()


@pytest.mark.parametrize("border", [2048, 3072, 1001])
@pytest.mark.parametrize(
    "options",
    [
        {"capturable": True},
        {"use_decoupled_grad": True},
        {"use_decoupled_grad": True, "exp_avg_dtype": torch.bfloat16},
        {"use_decoupled_grad": True, "master_weight_dtype": torch.float16},
    ],
    ids=" ".join,
)
def test_steps_of_shards_train_the_weight(border, options, device):
    """Also after a checkpoint was loaded. A shard of all values trains as the weight does."""
    weights = [a_weight(device, 48, 64) for _ in range(3)]
    shards = [shards_of(weight, border) for weight in weights[:2]]
    if border == 3072:  # the first shard has all values
        shards = [own[:1] for own in shards]
    decoupled = options.get("use_decoupled_grad", False)
    optimizers = [
        te.optimizers.FusedAdam(own, lr=0.05, master_weights=True, **options) for own in shards
    ]
    before = weights[0].dequantize().clone()
    stepped(optimizers[0], shards[0], 3, decoupled)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    weights[1].copy_(weights[0])
    for optimizer, own in zip(optimizers, shards, strict=True):
        stepped(optimizer, own, 3, decoupled)
    assert_bitwise(weights[0].dequantize(), weights[1].dequantize())
    assert (weights[0].dequantize() - before).abs().mean() > 0.05
    masters = [optimizers[0].get_unscaled_state(shard, "master_param") for shard in shards[0]]
    wanted = torch.cat(masters).view(48, 64)
    torch.testing.assert_close(weights[0].dequantize().float(), wanted, rtol=0.07, atol=1e-3)
    # fp16 masters are rounded, but the weight is cast from the values before that rounding.
    if border == 3072 and "master_weight_dtype" not in options:
        weights[2].copy_(wanted)
        assert_bitwise(weights[0].dequantize(), weights[2].dequantize())


def test_shards_step_in_place(device):
    """torch's optimizers step them without master weights."""
    weight = a_weight(device, 48, 64)
    before = weight.dequantize().float()
    shards = shards_of(weight, 1000)
    for fused in (False, True):
        optimizer = torch.optim.AdamW(shards, lr=0.1, weight_decay=0.0, fused=fused)
        for shard in shards:
            shard.grad = torch.ones_like(shard)
        optimizer.step()
    torch.testing.assert_close(weight.dequantize().float(), before - 0.2, rtol=0.1, atol=0.01)
    with pytest.raises(RuntimeError, match="expected master_weights=True"):
        te.optimizers.FusedAdam(shards).step()


def test_shards_of_several_processes_are_refused(device, monkeypatch):
    weight = a_weight(device, 48, 64)
    monkeypatch.setattr(parts, "group_or_world_size", lambda group: 2)
    for border in (1000, weight.numel()):
        shards = shards_of(weight, border)
        optimizer = te.optimizers.FusedAdam(shards, master_weights=True)
        with pytest.raises(NotImplementedError, match=r"as a whole .*precision_aware_optimizer"):
            stepped(optimizer, shards[:1], 1, decoupled=False)
    whole = te.optimizers.FusedAdam([weight], master_weights=True)
    stepped(whole, [weight], 1, decoupled=False)
