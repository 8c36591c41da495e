"""Memory of KV caches: changes by callers, inference mode, and values of ended sequences."""

import copy

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.inference import (
    KVCacheManager,
    NonPagedKVCacheManager,
)

HIDDEN, HEADS, LONGEST = 32, 4, 16
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FORMS = ["int", "tensor", "named", "paged"]


def make_layer(device, named=False):
    torch.manual_seed(3)
    mask = "padding_causal" if named else "causal"
    settings = {"self_attn_mask_type": mask, "attn_input_format": "bshd", "device": device}
    return te.TransformerLayer(HIDDEN, 48, HEADS, **settings).eval()


def make_params(form, device, batch=4):
    """Returns parameters with an offset (an int, or a tensor on the device), or named sequences."""
    if form in ("named", "paged"):
        pages = {"is_paged": True, "page_size": 4} if form == "paged" else {}
        sizes = (HEADS, HIDDEN // HEADS, torch.float32)
        return te.InferenceParams(batch, LONGEST, *sizes, **pages)
    params = te.InferenceParams(batch, LONGEST)
    if form == "tensor":
        params.sequence_len_offset = torch.zeros((), dtype=torch.int64, device=device)
    return params


@pytest.mark.parametrize("form", ["int", "tensor"])
@torch.no_grad()
def test_fewer_sequences_than_room_are_reordered_in_place(form, device):
    layer, params = make_layer(device), make_params(form, device)
    x, order = torch.randn(2, 7, HIDDEN, device=device), [1, 0]
    layer(x[:, :6], inference_params=params)
    memory = params.key_value_memory_dict[1]
    params.sequence_len_offset += 6
    params.swap_key_value_dict(torch.tensor(order, device=device))
    assert params.key_value_memory_dict[1] is memory
    last = layer(x[order, 6:], inference_params=params)
    torch.testing.assert_close(last, layer(x)[order, 6:], **CLOSE)
    params.reset()
    more = torch.randn(4, 7, HIDDEN, device=device)
    torch.testing.assert_close(layer(more, inference_params=params), layer(more), **CLOSE)
    with pytest.raises(ValueError, match=r"batch_indices of at most 4 sequences, got \(5,\)"):
        params.swap_key_value_dict([0, 1, 2, 3, 0])
    for wrong in ([0, 5], [-1, 0]):
        with pytest.raises(ValueError, match=rf"from 0 to 3, got \[{wrong[0]}, {wrong[1]}\]"):
            params.swap_key_value_dict(wrong)
    for mask in (torch.tensor([True, False]), [0.0, 1.0]):
        with pytest.raises(TypeError, match="batch_indices of int32 or int64, got torch"):
            params.swap_key_value_dict(mask)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_programs_may_replace_the_caches_of_a_layer(device, batch_first, qkv_format):
    """New caches may hold some of the sequences, with any strides; the offset is on the device."""
    params = make_params("int", device)
    layer = te.MultiheadAttention(HIDDEN, HEADS, qkv_format=qkv_format, device=device).eval()
    x = torch.randn(4, 7, HIDDEN, device=device)
    first = (lambda x: x) if qkv_format == "bshd" else (lambda x: x.transpose(0, 1).contiguous())
    layer(first(x[:, :5]), inference_params=params)
    pair, order = params.key_value_memory_dict[1], torch.tensor([2, 0], device=device)
    pair = tuple(one[:, order] for one in pair)
    if batch_first:
        pair = tuple(one.transpose(0, 1).contiguous().transpose(0, 1) for one in pair)
    params.key_value_memory_dict[1] = pair
    params.sequence_len_offset = torch.tensor(5, device=device)
    for begin in (5, 6):
        last = layer(first(x[order, begin : begin + 1]), inference_params=params)
        params.sequence_len_offset += 1
    whole = first(layer(first(x)))
    torch.testing.assert_close(first(last), whole[order, 6:], **CLOSE)
    with pytest.raises(ValueError, match=r"16 tokens and at least 4 sequences .* got \(16, 2, 4"):
        layer(first(x[:, :1]), inference_params=params)


@pytest.mark.parametrize("form", FORMS)
def test_prompts_in_inference_mode_and_steps_without(form, device):
    named = form in ("named", "paged")
    layer, params = make_layer(device, named), make_params(form, device)
    x, found = torch.randn(2, 8, HIDDEN, device=device), []
    modes = (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)
    for count, mode in zip((5, 1, 1, 1), modes, strict=True):
        begin = sum(part.shape[1] for part in found)
        if named:
            params.pre_step({"a": count, "b": count})
        with mode():
            found.append(layer(x[:, begin : begin + count], inference_params=params))
        if not named:
            params.sequence_len_offset += count
    whole = make_layer(device)(x)
    torch.testing.assert_close(torch.cat(found, 1), whole, **CLOSE)


@pytest.mark.parametrize("form", ["named", "paged"])
@torch.no_grad()
def test_nan_of_one_sequence_stays_there(form, device):
    """Neither other sequences of the batch nor later sequences in the same memory get NaN."""
    layer, params = make_layer(device, named=True), make_params(form, device)
    x = torch.randn(3, 8, HIDDEN, device=device)
    bad = torch.full_like(x[:1], torch.nan)
    whole = make_layer(device)(x)
    params.pre_step({"bad": 3, "short": 1, "long": 8})
    out = layer(torch.cat([bad, x[1:]]), inference_params=params)
    torch.testing.assert_close(out[1, :1], whole[1, :1], **CLOSE)
    torch.testing.assert_close(out[2], whole[2], **CLOSE)
    params.pre_step({"short": 1})
    out = layer(x[1:2, 1:2], inference_params=params)
    torch.testing.assert_close(out, whole[1:2, 1:2], **CLOSE)
    params.reset()
    params.pre_step({"bad": 8})
    layer(bad, inference_params=params)
    params.pre_step({"new": 2, "next": 6})
    out = layer(x[:2, :6], inference_params=params)
    torch.testing.assert_close(out[0, :2], whole[0, :2], **CLOSE)
    torch.testing.assert_close(out[1, :6], whole[1, :6], **CLOSE)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_another_model_may_have_the_cache_after_a_reset(form):
    named, params = form in ("named", "paged"), make_params(form, "cpu")
    for _ in range(2):
        if named:
            params.pre_step({"a": 3, "b": 3})
        make_layer("cpu", named)(torch.randn(2, 3, HIDDEN), inference_params=params)
        params.reset()


@torch.no_grad()
def test_reset_forgets_nan_behind_an_offset_on_the_device(device):
    layer, params = make_layer(device), make_params("tensor", device)
    x = torch.randn(2, 4, HIDDEN, device=device)
    layer(torch.full((2, 8, HIDDEN), torch.nan, device=device), inference_params=params)
    params.reset()
    torch.testing.assert_close(layer(x, inference_params=params), layer(x), **CLOSE)


@torch.no_grad()
def test_angles_of_fewer_positions_than_the_cache_has_are_refused(device):
    layer, params = make_layer(device), make_params("tensor", device)
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LONGEST - 1)
    x = torch.randn(1, 2, HIDDEN, device=device)
    with pytest.raises(ValueError, match=r"rotary_pos_emb of at least 16 positions, max_seq"):
        layer(x, rotary_pos_emb=angles, inference_params=params)


def written(form, device):
    """Returns a cache for three sequences, which holds one of six and one of four tokens."""
    params = make_params(form, device, 3)
    params.pre_step({"a": 6, "b": 4})
    new = torch.randn(2, 6, HEADS, HIDDEN // HEADS, device=device)
    params.step(1, new, new + 1, "bshd")
    return params


def test_swap_says_where_keys_of_named_sequences_are():
    with pytest.raises(ValueError, match=r"none in key_value_memory_dict; .* cache_manager.cache"):
        written("named", "cpu").swap_key_value_dict([1, 0])


@pytest.mark.parametrize("fixed", [False, True])
def test_programs_may_reorder_named_sequences(device, fixed):
    """Beam search does so. Dimension 0 of keys and values is the batch."""
    params = written("named", device)
    cache = params.cache_manager.cache
    keys, values = cache[1]
    assert keys.shape == values.shape == (3, LONGEST, HEADS, HIDDEN // HEADS)
    before, order = keys.clone(), torch.tensor([1, 0, 2], device=device)
    copied = copy.deepcopy(params).cache_manager
    for layer, pair in cache.items():
        cache[layer] = tuple(one.index_select(0, order) for one in pair)
    assert torch.equal(keys, before[order])  # in the memory that CUDA graphs read
    params.pre_step({"a": 1, "b": 1})
    new = torch.full((3 if fixed else 2, 1, *keys.shape[2:]), 7.0, device=device)
    found = params.step(1, new, new, "bshd")
    assert torch.equal(found.keys[:2, :4], before[order[:2], :4])
    assert bool((found.keys[0, 6] == 7).all() and (found.keys[1, 4] == 7).all())
    assert torch.equal(found.values[1, :4], before[0, :4] + 1)
    assert torch.equal(copied.cache[1][0], before)


def test_caches_that_do_not_fit_are_refused():
    cache = written("named", "cpu").cache_manager.cache
    pair = cache[1]
    sizes = r"\(3, 16, 4, 8\)"
    expected = rf"values of \[{sizes}, {sizes}\] for the cache of layer number 1, got \["
    for other in (tuple(one[:1] for one in pair), tuple(one[:, :5] for one in pair), pair[:1]):
        with pytest.raises(ValueError, match=expected):
            cache[1] = other
    for other in (tuple(one.flatten(0, 1) for one in pair), None, (pair[0], None)):
        with pytest.raises(
            ValueError, match=r"values of \[\(3, 16, 'heads', 'size'\), .* number 2"
        ):
            cache[2] = other


@pytest.mark.parametrize("form", ["named", "paged"])
def test_programs_may_rebind_the_cache(form, device):
    """Tensors in an assigned dict are copied into the memory of the cache."""
    manager = written(form, device).cache_manager
    seen = manager.cache[1]
    for step in (1, 2):
        pair = tuple(one + step for one in seen)
        if step == 1:
            manager.cache = {1: pair}
        else:
            manager.cache |= {1: pair}
        for one, other in zip(seen, pair, strict=True):
            assert torch.equal(one, other)
    manager.cache.clear()
    assert 1 not in manager.cache


class Allocates(NonPagedKVCacheManager):
    """A user's manager, which allocates the memory."""

    def allocate_memory(self, layer_number, device=None):
        if layer_number not in self.cache:
            shape = (self.max_batch_size, self.max_seqlen, self.num_heads, self.sizes[0])
            zeros = torch.zeros(shape, dtype=self.dtype, device=device)
            self.cache[layer_number] = (zeros, zeros.clone())


class WithoutSizes(KVCacheManager):
    """A user's manager without `sizes_of_layer`."""

    def rows_of_layer(self):
        return self.max_batch_size * self.max_seqlen

    def make_room(self, kept_slots, lengths):
        pass


@pytest.mark.parametrize("fixed", [False, True])
def test_managers_may_allocate_by_assignment(device, fixed):
    params = te.InferenceParams(3, 16, custom_cache_manager=Allocates(3, 16, 2, 8, torch.float32))
    params.pre_step({"a": 4, "b": 4})
    new = torch.randn(3 if fixed else 2, 4, 2, 8, device=device)
    found = params.step(1, new, new + 1, "bshd")
    assert torch.equal(found.keys[:2, :4], new[:2])
    assert torch.equal(params.cache_manager.cache[1][1][:2, :4], new[:2] + 1)


def test_managers_without_sizes_are_refused_in_words():
    manager = WithoutSizes(3, 16, 2, 8, torch.float32)
    manager.pre_step({"a": 1})
    with pytest.raises(NotImplementedError, match=r"expected WithoutSizes to have sizes_of_layer"):
        manager.allocate_memory(1)


def test_pages_are_in_dimension_0():
    keys, values = written("paged", "cpu").cache_manager.cache[1]
    assert keys.shape == values.shape == (3 * LONGEST // 4, 4, HEADS, HIDDEN // HEADS)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_values_that_do_not_belong_to_the_keys(form, qkv_format):
    """Values of fewer tokens or sequences would be broadcast, and further ones left out."""
    mask = "padding_causal" if form in ("named", "paged") else "causal"
    attention = te.DotProductAttention(
        HEADS, HIDDEN // HEADS, qkv_format=qkv_format, attn_mask_type=mask
    )
    key = torch.randn(2, 2, HEADS, HIDDEN // HEADS)
    for tokens, batch in ((1, 2), (3, 2), (2, 1), (2, 3)):
        params = make_params(form, "cpu")
        if form in ("named", "paged"):
            params.pre_step({"a": 2, "b": 2})
        sizes = (tokens, batch) if qkv_format == "sbhd" else (batch, tokens)
        value = torch.randn(*sizes, HEADS, HIDDEN // HEADS)
        with pytest.raises(
            ValueError, match=r"keys and values of the same tokens.*number (None|1)"
        ):
            attention(key, key, value, inference_params=params)


@torch.no_grad()
def test_more_queries_than_new_keys():
    """An offset on the device gives the lengths of keys to queries: further ones were zeros."""
    attention = te.DotProductAttention(HEADS, HIDDEN // HEADS)
    query, key = torch.randn(2, 3, 1, HEADS, HIDDEN // HEADS)
    with pytest.raises(ValueError, match="expected as many queries as new keys"):
        attention(query, key[:2], key[:2], inference_params=make_params("tensor", "cpu"))


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize(
    "name",
    ["num_heads_kv", "head_dim_k", "head_dim_v", "total_num_pages", "page_size", "max_ctx_len"],
)
def test_sizes_of_caches(name, wrong):
    sizes = {"num_heads_kv": 2, "head_dim_k": 8, "dtype": torch.float32}
    sizes |= {"is_paged": True, "page_size": 4, name: wrong}
    message = "to be an int, got" if wrong not in (0, -1) else ">= 1, got"
    with pytest.raises((TypeError, ValueError), match=rf"^\[Inf\w+\] expected {name} {message}"):
        te.InferenceParams(2, LONGEST, **sizes)


@pytest.mark.parametrize("name", ["sequence_len_offset", "batch_size_offset"])
@pytest.mark.parametrize("wrong", [1.5, True, None])
def test_offsets_that_are_no_ints(name, wrong):
    params = make_params("int", "cpu")
    setattr(params, name, wrong)
    with pytest.raises(TypeError, match=rf"^\[InferenceParams\] expected {name} to be an int, got"):
        make_layer("cpu")(torch.randn(2, 1, HIDDEN), inference_params=params)


def test_layers_without_a_cache():
    params = make_params("paged", "cpu")
    with pytest.raises(ValueError, match=r"expected a step .* got no cache \(layer number 2\)"):
        params.convert_paged_to_nonpaged(2)


@pytest.mark.parametrize("indices", [None, "ab", {0: 1}])
def test_indices_of_sequences_that_are_no_lists(indices):
    params = make_params("int", "cpu")
    make_layer("cpu")(torch.randn(2, 1, HIDDEN), inference_params=params)
    with pytest.raises(TypeError, match=r"^\[InferenceParams\] expected batch_indices of int32"):
        params.swap_key_value_dict(indices)
