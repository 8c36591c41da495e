"""Frequencies of rotary position embedding: assigned, loaded, converted, cast by FSDP."""

import copy
import math

import pytest
import torch

from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding


def of_base(base, device="cpu"):
    """Returns the angles of 4 positions, and the frequencies."""
    module = RotaryPositionEmbedding(8, rotary_base=base).to(device)
    return module(4), module.inv_freq.clone()


@pytest.mark.parametrize("in_place", [False, True])
def test_assigned_frequencies(device, in_place):
    """Assigned frequencies, for instance the scaled ones of Llama, stay in fp32 when converted."""
    module = RotaryPositionEmbedding(8).to(device)
    expected, frequencies = of_base(5e5, device)
    if in_place:
        module.inv_freq.copy_(frequencies)
    else:
        module.inv_freq = frequencies
    for converted in (module, module.half(), module.to(torch.bfloat16), copy.deepcopy(module)):
        assert torch.equal(converted(4), expected)
        assert converted.inv_freq.dtype is torch.float32
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(4), expected)
    module.rotary_base = 1e4  # the same value changes nothing
    module.seq_len_interpolation_factor = 2.0
    assert torch.equal(module(4), expected / 2)
    module.seq_len_interpolation_factor = None
    module.rotary_base = 300.0
    assert torch.equal(module(4), of_base(300.0, device)[0])


@pytest.mark.parametrize("leave", ["to_empty", "reset_parameters", "load"])
def test_frequencies_that_leave_meta(leave):
    expected, frequencies = of_base(5e5)
    with torch.device("meta"):
        model = torch.nn.Sequential(RotaryPositionEmbedding(8, rotary_base=5e5))
    if leave == "reset_parameters":
        with torch.device("cpu"):
            model[0].reset_parameters()
    if leave == "to_empty":
        model.to_empty(device="cpu")
    if leave == "load":
        model.load_state_dict({"0.inv_freq": frequencies}, assign=True)
    assert torch.equal(model[0](4), expected)
    model[0].inv_freq = other = torch.rand(4)
    model[0].reset_parameters()
    model.to_empty(device="cpu")
    assert torch.equal(model[0].inv_freq, other)


def test_checkpoints_with_frequencies():
    """Checkpoints of NVIDIA's package have them; ours do not, and load without an error, too."""
    expected, frequencies = of_base(5e5)
    model = torch.nn.ModuleDict({"rope": RotaryPositionEmbedding(8)})
    model.load_state_dict({"rope.inv_freq": frequencies})
    assert model.state_dict() == {}
    model.load_state_dict({})
    assert torch.equal(model.rope(4), expected)
    with pytest.raises(RuntimeError, match=r"expected rope.inv_freq of shape \(4,\), got \(5,\)"):
        model.load_state_dict({"rope.inv_freq": torch.ones(5)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"rope.other": frequencies})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["data", "checkpoint"])
def test_frequencies_that_others_round(dtype, by, device):
    """FSDP casts buffers, and 16-bit models save them rounded: angles stay exact nevertheless."""
    module = RotaryPositionEmbedding(64).to(device)
    expected = module(4096)
    if by == "data":
        module.inv_freq.data = module.inv_freq.data.to(dtype)
    else:
        module.load_state_dict({"inv_freq": module.inv_freq.to(dtype)})
    assert torch.equal(module(4096), expected)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(4096), expected)
    module.inv_freq = other = torch.rand(32, device=device).to(dtype)
    assert torch.equal(module(2)[1, 0, 0, :32], other.float())


def test_frequencies_of_another_size():
    module = RotaryPositionEmbedding(8)
    module.inv_freq = torch.ones(3)
    with pytest.raises(ValueError, match=r"expected inv_freq of shape \(4,\), got \(3,\)"):
        module(4)


def test_refused_settings_change_nothing():
    module = RotaryPositionEmbedding(8)
    expected = module(4)
    for wrong, error in ((-2, ValueError), (5, ValueError), ("a", TypeError)):
        with pytest.raises(error):
            module.dim = wrong
    with pytest.raises(TypeError):
        module.rotary_base = "x"
    assert torch.equal(module(4), expected)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rotary_base": 0}, ValueError, "rotary_base > 0, got 0"),
        ({"rotary_base": -5.0}, ValueError, r"rotary_base > 0, got -5\.0"),
        ({"rotary_base": math.nan}, ValueError, "rotary_base > 0, got nan"),
        ({"rotary_base": "x"}, TypeError, "rotary_base to be a number, got 'x'"),
        ({"seq_len_interpolation_factor": "x"}, TypeError, "factor to be a number, got 'x'"),
        ({"pretrained_max_position_embeddings": 0}, ValueError, "embeddings >= 1, got 0"),
        ({"pretrained_max_position_embeddings": "x"}, TypeError, "to be an int, got 'x'"),
    ],
)
def test_settings_without_angles(settings, error, message):
    with pytest.raises(error, match=rf"^\[RotaryPositionEmbedding\] expected .*{message}"):
        RotaryPositionEmbedding(8, **settings)
