"""Lengths of named sequences on the device: padded batches, and captures of CUDA graphs."""

from collections import OrderedDict

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.cache import inference, kv_cache, memory

HIDDEN, HEADS, GROUPS, LONGEST, SLOTS = 256, 4, 2, 24, 3
# Sequences join, get no token in some steps, and end; then later ones move to the free slots. New
# sequences come last.
STEPS = [{"a": 4, "b": 6}, {"a": 1, "b": 0}, {"b": 2, "c": 6}, {"b": 5, "c": 0, "d": 1}, {"d": 1}]


def make_layers(device, qkv_format, dtype, count=2):
    torch.manual_seed(3)
    return torch.nn.ModuleList(
        te.TransformerLayer(
            HIDDEN,
            64,
            HEADS,
            num_gqa_groups=GROUPS,
            layer_number=i + 1,
            self_attn_mask_type="padding_causal",
            attn_input_format=qkv_format,
            params_dtype=dtype,
            device=device,
        )
        for i in range(count)
    ).eval()


def make_cache(qkv_format, dtype, paged):
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 16} if paged else {}
    return te.InferenceParams(
        SLOTS,
        LONGEST,
        GROUPS,
        HIDDEN // HEADS,
        dtype,
        max_ctx_len=6,
        qkv_format=qkv_format,
        **pages,
    )


def padded(rows, room, qkv_format):
    """Returns the new tokens of all sequences in the format, padded with garbage."""
    if qkv_format == "thd":
        packed = torch.cat(rows)
        return torch.cat([packed, packed.new_full((SLOTS * room - len(packed), HIDDEN), 7.0)])
    out = rows[0].new_full((SLOTS, room, HIDDEN), 7.0)
    for slot, row in zip(out, rows, strict=False):
        slot[: len(row)] = row
    return out if qkv_format == "bshd" else out.transpose(0, 1).contiguous()


def real_rows(out, counts, qkv_format):
    if qkv_format == "thd":
        return out[: sum(counts)].split(counts)
    out = out if qkv_format == "bshd" else out.transpose(0, 1)
    return [row[:count] for row, count in zip(out, counts, strict=False)]


def generate(layers, cache, inputs, room, qkv_format, steps=STEPS):
    """Returns the outputs of each sequence over all steps."""
    angles = angles_on(inputs["a"].device)
    results, done, order = {name: [] for name in inputs}, dict.fromkeys(inputs, 0), []
    for step in steps:
        order = [name for name in order if name in step] + [n for n in step if n not in order]
        cache.pre_step(OrderedDict((name, step[name]) for name in order))
        counts = [step[name] for name in order]
        rows = [inputs[n][done[n] : done[n] + step[n]] for n in order]
        x = padded(rows, room, qkv_format)
        for layer in layers:
            x = layer(x, rotary_pos_emb=angles, inference_params=cache)
        for name, row in zip(order, real_rows(x, counts, qkv_format), strict=True):
            results[name].append(row.clone())
            done[name] += len(row)
    return {name: torch.cat(parts) for name, parts in results.items()}


def all_inputs(device, dtype, steps=STEPS):
    torch.manual_seed(5)
    totals = {}
    for step in steps:
        totals = {name: totals.get(name, 0) + step.get(name, 0) for name in {**totals, **step}}
    return {n: torch.randn(t, HIDDEN, device=device, dtype=dtype) for n, t in totals.items()}


def assert_as_whole_calls(found, inputs, **close):
    """Compares each sequence with one call over all its tokens."""
    like = inputs["a"]
    layers, angles = make_layers(like.device, "bshd", like.dtype), angles_on(like.device)
    for name, tokens in inputs.items():
        x = tokens[None]
        for layer in layers:
            x = layer(x, rotary_pos_emb=angles, self_attn_mask_type="causal")
        torch.testing.assert_close(found[name], x[0], **close)


def angles_on(device):
    return te.RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LONGEST)


@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@torch.no_grad()
def test_padded_batches(device, qkv_format, paged, monkeypatch):
    """As in a graph, batches have all slots and room for the longest step; padding is garbage."""
    monkeypatch.setattr(kv_cache, "_in_graph", lambda: True)
    inputs = all_inputs(device, torch.float32)
    layers = make_layers(device, qkv_format, torch.float32)
    cache = make_cache(qkv_format, torch.float32, paged)
    found = generate(layers, cache, inputs, 6, qkv_format)
    assert_as_whole_calls(found, inputs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_absent_sequences_are_padding():
    """A batch of max_batch_size holds fewer sequences; a batch of another size is an error."""
    inputs = all_inputs("cpu", torch.float32)
    layers = make_layers("cpu", "bshd", torch.float32)
    cache = make_cache("bshd", torch.float32, paged=False)
    found = generate(layers, cache, inputs, 6, "bshd")
    assert_as_whole_calls(found, inputs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"of 1 sequences, .* or of max_batch_size=3 .* got 2"):
        layers[0](torch.randn(2, 1, HIDDEN), inference_params=cache)
    for step, message in (
        ({"e": 7}, "at most max_ctx_len=6 new tokens"),
        ({"d": 1, "e": 0}, "expected 1 or more tokens of a new sequence, .* got 0 .*'e'"),
        ({"d": -1}, "and 0 or more of one in the cache, got -1 .*'d'"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.pre_step(step)


@pytest.mark.parametrize("others", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@torch.no_grad()
def test_layers_on_several_devices(others, paged):
    """Lengths of a step with absent sequences are on each device; meta stands for a GPU."""
    first, second = make_layers("cpu", "bshd", torch.float32)
    second.to(others)
    cache = make_cache("bshd", torch.float32, paged)
    tokens, results = torch.randn(3, HIDDEN), []
    for token in tokens:
        cache.pre_step({"a": 1})
        x = first(padded([token[None]], 1, "bshd"), inference_params=cache)
        results.append(second(x.to(others), inference_params=cache)[0, 0])
    if others != "meta":
        whole = first(tokens[None], self_attn_mask_type="causal").to(others)
        whole = second(whole, self_attn_mask_type="causal")
        torch.testing.assert_close(torch.stack(results), whole[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
@torch.no_grad()
def test_a_sequence_that_waits(device, qkv_format, paged):
    """It gets no token in a step in which others do, for instance in continuous batching."""
    steps = [{"a": 4, "b": 2, "c": 3}, {"a": 0, "b": 1, "c": 0}, {"a": 2, "b": 0, "c": 1}]
    inputs = all_inputs(device, torch.float32, steps)
    layers = make_layers(device, qkv_format, torch.float32)
    cache = make_cache(qkv_format, torch.float32, paged)
    results = {name: [] for name in inputs}
    for step in steps:
        cache.pre_step(step)
        done = {name: sum(map(len, rows)) for name, rows in results.items()}
        rows = [inputs[name][done[name] : done[name] + new] for name, new in step.items()]
        x = torch.cat(rows) if qkv_format == "thd" else padded(rows, max(step.values()), "bshd")
        for layer in layers:
            x = layer(x, rotary_pos_emb=angles_on(device), inference_params=cache)
        found = real_rows(x, [*step.values()], qkv_format)
        for name, row in zip(step, found, strict=True):
            results[name].append(row.clone())
    outputs = {name: torch.cat(rows) for name, rows in results.items()}
    assert_as_whole_calls(outputs, inputs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_no_graph_can_hold(monkeypatch):
    """Lengths on the host, which replays ignore, and new caches, which replays would clear."""
    layers, x = make_layers("cpu", "bshd", torch.float32, 1), torch.randn(SLOTS, 1, HIDDEN)
    numbers, tensor = te.InferenceParams(SLOTS, LONGEST), te.InferenceParams(SLOTS, LONGEST)
    tensor.sequence_len_offset = torch.tensor(0)
    named, short = make_cache("bshd", torch.float32, paged=False), angles_on("cpu")[:4]
    named.pre_step({"a": 1})
    layers[0](x, inference_params=numbers, self_attn_mask_type="causal")
    for module in (inference, kv_cache, memory):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    for cache, error, message in (
        (numbers, RuntimeError, "sequence_len_offset to be a tensor on the device .* int 0"),
        (tensor, RuntimeError, "cache of layer number 1 before the capture"),
        (named, RuntimeError, r"cache of layer number 1 .* or allocate_memory"),
    ):
        mask = "padding_causal" if cache is named else "causal"
        with pytest.raises(error, match=message):
            layers[0](x, inference_params=cache, self_attn_mask_type=mask)
    with pytest.raises(RuntimeError, match="pre_step before a replay, got it within the capture"):
        named.pre_step({"a": 1})
    monkeypatch.undo()
    layers[0](x, inference_params=named)
    monkeypatch.setattr(kv_cache, "is_capturing", lambda: True)
    with pytest.raises(ValueError, match="at least 24 positions, max_sequence_length, got"):
        layers[0](x, inference_params=named, rotary_pos_emb=short)
    layers[0](x, inference_params=named, rotary_pos_emb=angles_on("cpu"))


# ---- On a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("room", [6, 1])
@torch.no_grad()
def test_graphed_layers(qkv_format, paged, dtype, room):
    """As in NVIDIA's tests: each layer is a graphed callable, `pre_step` runs outside of graphs."""
    single = [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"b": 1, "c": 1}, {"c": 1}]
    steps = STEPS if room > 1 else single
    inputs = all_inputs("cuda", dtype, steps)
    layers = make_layers("cuda", qkv_format, dtype)
    cache = make_cache(qkv_format, dtype, paged)
    shape = {"bshd": (SLOTS, room), "sbhd": (room, SLOTS), "thd": (SLOTS * room,)}[qkv_format]
    sample = torch.randn(*shape, HIDDEN, device="cuda", dtype=dtype)
    cache.pre_step(OrderedDict((i, room) for i in range(SLOTS)))
    options = {"inference_params": cache, "rotary_pos_emb": angles_on("cuda")}
    graphed = [te.make_graphed_callables(one, (sample,), sample_kwargs=options) for one in layers]
    cache.reset()
    found = generate(graphed, cache, inputs, room, qkv_format, steps)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 5e-2}
    assert_as_whole_calls(found, inputs, **close)


@pytest.mark.gpu
@torch.no_grad()
def test_a_capture_with_lengths_of_the_host_is_an_error():
    layers = make_layers("cuda", "bshd", torch.float32, 1)
    x, cache = torch.randn(SLOTS, 1, HIDDEN, device="cuda"), te.InferenceParams(SLOTS, LONGEST)
    options = {"inference_params": cache, "self_attn_mask_type": "causal"}
    with pytest.raises(RuntimeError, match="sequence_len_offset to be a tensor on the device"):
        te.make_graphed_callables(layers[0], (x,), sample_kwargs=options)
