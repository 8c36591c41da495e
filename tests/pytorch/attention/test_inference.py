"""KV cache: steps with a cache give what one call over all tokens gives."""

from collections import OrderedDict

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.core import query_key
from transformer_engine.pytorch.attention.rope import embedding

HIDDEN, HEADS, LONGEST = 32, 4, 24


def make_layer(device, qkv_format="sbhd", mask="causal", **options):
    torch.manual_seed(3)
    return te.TransformerLayer(
        HIDDEN,
        48,
        HEADS,
        num_gqa_groups=2,
        self_attn_mask_type=mask,
        attn_input_format=qkv_format,
        device=device,
        **options,
    ).eval()


def angles_on(device):
    return te.RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LONGEST)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize(("rope", "window"), [(True, None), (False, (3, 0))], ids=str)
@torch.no_grad()
def test_steps_equal_one_call(device, qkv_format, rope, window):
    layer = make_layer(device, qkv_format, window_size=window)
    angles = angles_on(device) if rope else None
    x = torch.randn(3, 11, HIDDEN, device=device)
    tokens = 1 if qkv_format == "bshd" else 0
    x = x if tokens else x.transpose(0, 1).contiguous()
    whole = layer(x, rotary_pos_emb=angles)
    params = te.InferenceParams(4, LONGEST)
    params.batch_size_offset = 1
    parts = []
    for count in (5, 1, 1, 3, 1):
        part = x.narrow(tokens, params.sequence_len_offset, count)
        parts.append(layer(part, inference_params=params, rotary_pos_emb=angles))
        params.sequence_len_offset += count
    torch.testing.assert_close(torch.cat(parts, tokens), whole, rtol=1e-4, atol=1e-5)
    keys, values = params.key_value_memory_dict[1]
    assert keys.shape == values.shape == (LONGEST, 4, 2, HIDDEN // HEADS)
    assert not keys[:, 0].any()
    assert keys[:11, 1:].all()


@pytest.mark.parametrize("padded", [[], [0, 1], [3, 4]], ids=["none", "left", "behind the prompt"])
@torch.no_grad()
def test_prompts_with_padding(device, padded):
    """Masks say which tokens of a prompt are padding, wherever they are."""
    layer = make_layer(device, mask="padding_causal")
    x = torch.randn(7, 2, HIDDEN, device=device)
    hidden = torch.zeros(2, 1, 1, 7, dtype=torch.bool, device=device)
    hidden[0, ..., padded] = True
    whole = layer(x, hidden)
    params, parts = te.InferenceParams(2, LONGEST), []
    for count in (5, 1, 1):
        begin, end = params.sequence_len_offset, params.sequence_len_offset + count
        masks = hidden[..., begin:end], hidden[..., :end]
        parts.append(layer(x[begin:end], masks, inference_params=params))
        params.sequence_len_offset = end
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["plain", "on the device", "named"])
@torch.no_grad()
def test_cross_attention_of_steps(device, form):
    """Queries are rotated by their positions, keys by positions in the encoder's output."""
    mask = "padding_causal" if form == "named" else "causal"
    layer = make_layer(device, mask=mask, layer_type="decoder")
    x, encoded = (torch.randn(n, 2, HIDDEN, device=device) for n in (6, 5))
    how = {"encoder_output": encoded, "rotary_pos_emb": angles_on(device)}
    whole = layer(x, self_attn_mask_type="causal", **how)
    cache = (2, HIDDEN // HEADS, torch.float32) if form == "named" else ()
    params, parts = te.InferenceParams(2, LONGEST, *cache), []
    if form == "on the device":
        params.sequence_len_offset = torch.tensor(0, device=device)
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        if form == "named":
            params.pre_step(OrderedDict.fromkeys("ab", end - begin))
        parts.append(layer(x[begin:end], inference_params=params, **how))
        if form != "named":
            params.sequence_len_offset += end - begin
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_queries_and_keys_are_rotated_by_one_kernel(device, monkeypatch):
    """One kernel rotates queries and keys that are adjacent in memory and have the same angles."""
    calls = []
    for file in (query_key, embedding):
        monkeypatch.setattr(
            file, "rope", lambda *args, rope=file.rope: calls.append(1) or rope(*args)
        )
    layer = make_layer(device)
    x, angles = torch.randn(5, 2, HIDDEN, device=device), angles_on(device)
    layer(x, rotary_pos_emb=angles, inference_params=te.InferenceParams(2, LONGEST))
    assert len(calls) == 1
    pair = (angles, angles.clone())
    layer(x, rotary_pos_emb=pair, inference_params=te.InferenceParams(2, LONGEST))
    assert len(calls) == 3


@torch.no_grad()
def test_swap(device):
    layer = make_layer(device)
    x = torch.randn(7, 2, HIDDEN, device=device)
    order = [1, 0]
    params = te.InferenceParams(2, LONGEST)
    with pytest.raises(ValueError, match="expected cached keys to swap"):
        params.swap_key_value_dict(order)
    layer(x[:6], inference_params=params)
    params.sequence_len_offset = 6
    params.swap_key_value_dict(order)
    last = layer(x[6:, order], inference_params=params)
    torch.testing.assert_close(last, layer(x)[6:, order], rtol=1e-4, atol=1e-5)


def test_overflow_names_the_layer():
    layer = make_layer("cpu", layer_number=7)
    params = te.InferenceParams(2, 4)
    layer(torch.randn(3, 2, HIDDEN), inference_params=params)
    params.sequence_len_offset = 3
    with pytest.raises(ValueError, match=r"at most 4 tokens of 2 sequences, got 5 of 2.*number 7"):
        layer(torch.randn(2, 2, HIDDEN), inference_params=params)
    params.sequence_len_offset = 0
    with pytest.raises(ValueError, match="got 2 of 3"):
        layer(torch.randn(2, 3, HIDDEN), inference_params=params)


@torch.no_grad()
def test_cross_attention_keeps_no_cache(device):
    layer = make_layer(device, layer_type="decoder")
    x, seen = torch.randn(5, 2, HIDDEN, device=device), torch.randn(6, 2, HIDDEN, device=device)
    params = te.InferenceParams(2, LONGEST)
    first = layer(x[:4], encoder_output=seen, inference_params=params)
    params.sequence_len_offset = 4
    other = torch.randn_like(seen)
    last = layer(x[4:], encoder_output=other, inference_params=params)
    expected = layer(x, encoder_output=seen)[:4], layer(x, encoder_output=other)[4:]
    torch.testing.assert_close((first, last), expected, rtol=1e-4, atol=1e-5)


# ---- Named sequences ----

# New tokens of each sequence in each step. Sequences join, grow by one or more tokens, and end.
STEPS = [{"a": 4, "b": 7}, {"a": 1, "b": 1}, {"b": 1, "c": 5}, {"d": 2, "c": 1, "b": 3}, {"d": 1}]
ENDED_LENGTHS = {"a": 5, "b": 12, "c": 6, "d": 3}


def manager_options(kind, device):
    options = {"num_heads_kv": 2, "head_dim_k": HIDDEN // HEADS, "dtype": torch.float32}
    if kind == "paged":  # as few pages as the steps need
        options |= {"is_paged": True, "page_size": 4, "total_num_pages": 6}
    return options


def laid_out(tokens, qkv_format):
    """Joins `{name: [new, hidden]}` into one tensor in the format."""
    if qkv_format == "thd":
        return torch.cat(list(tokens.values()))
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens.values()), batch_first=True)
    return padded if qkv_format == "bshd" else padded.transpose(0, 1).contiguous()


def taken_apart(out, counts, qkv_format):
    if qkv_format == "thd":
        return out.split(list(counts.values()))
    out = out if qkv_format == "bshd" else out.transpose(0, 1)
    return [row[:count] for row, count in zip(out, counts.values(), strict=True)]


@pytest.mark.parametrize("kind", ["whole", "paged"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@torch.no_grad()
def test_named_sequences(device, kind, qkv_format):
    layer = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=2,
        attn_mask_type="padding_causal",
        qkv_format=qkv_format,
        device=device,
    ).eval()
    angles = angles_on(device)
    params = te.InferenceParams(
        3, LONGEST, max_ctx_len=LONGEST, qkv_format=qkv_format, **manager_options(kind, device)
    )
    inputs = {name: torch.randn(n, HIDDEN, device=device) for name, n in ENDED_LENGTHS.items()}
    done, results = dict.fromkeys(inputs, 0), {name: [] for name in inputs}
    order = []
    for step in STEPS:
        params.pre_step(OrderedDict(step))
        order = [name for name in order if name in step]
        order += [name for name in step if name not in order]
        counts = {name: step[name] for name in order}
        new = {name: inputs[name][done[name] : done[name] + n] for name, n in counts.items()}
        assert params.get_seqlens_pre_step().tolist() == [done[name] for name in order]
        x = laid_out(new, qkv_format)
        out = layer(x, inference_params=params, rotary_pos_emb=angles)
        for name, rows in zip(order, taken_apart(out, counts, qkv_format), strict=True):
            results[name].append(rows)
            done[name] += counts[name]
    assert done == ENDED_LENGTHS
    reference = te.MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=2, device=device).eval()
    reference.load_state_dict(layer.state_dict())
    for name, x in inputs.items():
        whole = reference(x[:, None], rotary_pos_emb=angles)[:, 0]
        torch.testing.assert_close(torch.cat(results[name]), whole, rtol=1e-4, atol=1e-5)


def test_pages_come_back():
    params = te.InferenceParams(3, LONGEST, **manager_options("paged", "cpu"))
    params.pre_step({"a": 12, "b": 8})
    with pytest.raises(RuntimeError, match=r"KV cache is full! .* at most 1 more pages of 4"):
        params.pre_step({"a": 1, "b": 1})
    assert params.get_seqlens_pre_step().tolist() == [0, 0], "an error leaves everything as it was"
    params.pre_step({"b": 1})
    params.pre_step({"b": 1, "c": 12})
    params.reset()
    params.pre_step({"d": 24})


def test_paged_and_whole_hold_the_same():
    keys = torch.randn(2, 5, 2, 8)
    held = []
    for kind in ("whole", "paged"):
        params = te.InferenceParams(3, LONGEST, **manager_options(kind, "cpu"))
        params.pre_step({"a": 5, "b": 3})
        step = params.step(1, keys, -keys, "bshd")
        assert step.cu_seqlens_q.tolist() == step.cu_seqlens_kv.tolist() == [0, 5, 8, 8]
        assert (step.max_seqlen_kv, step.qkv_format) == (5, "bshd_2bshd")
        rows = params.convert_paged_to_nonpaged(1)
        assert rows[0].shape == (2, LONGEST, 2, 8)
        held.append([rows[0][0, :5], rows[0][1, :3], rows[1][0, :5], rows[1][1, :3]])
    for whole, paged in zip(*held, strict=True):
        assert torch.equal(whole, paged)
    assert torch.equal(held[0][0], keys[0])


def test_bad_arguments():
    with pytest.raises(ValueError, match="together, got no dtype"):
        te.InferenceParams(2, 8, num_heads_kv=2, head_dim_k=8)
    for dtype in (torch.int8, torch.float64, "bf16"):
        with pytest.raises(TypeError, match=f"expected dtype .* torch.bfloat16, got {dtype!r}"):
            te.InferenceParams(2, 8, 2, 8, dtype)
    with pytest.raises(ValueError, match="expected max_ctx_len with qkv_format 'thd'"):
        te.InferenceParams(2, 8, 2, 8, torch.float32, qkv_format="thd")
    with pytest.raises(ValueError, match="divisible by page_size, got 8 and 3"):
        te.InferenceParams(2, 8, 2, 8, torch.float32, is_paged=True, page_size=3)
    with pytest.raises(ValueError, match="with is_paged"):
        te.InferenceParams(2, 8, is_paged=True, page_size=4)
    with pytest.raises(ValueError, match="for steps of named sequences"):
        te.InferenceParams(2, 8).pre_step({"a": 1})
    params = te.InferenceParams(2, 8, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="at most 2 sequences, got 3"):
        params.pre_step({"a": 1, "b": 1, "c": 1})
    with pytest.raises(ValueError, match=r"at most 8 tokens of a sequence, got 9 \(sequence 'a'\)"):
        params.pre_step({"a": 9})
    params.pre_step({"a": 2})
    attention = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd")
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 2, 8)
    with pytest.raises(ValueError, match="expected a padding mask type"):
        attention(query, key, key, inference_params=params)
    with pytest.raises(ValueError, match=r"keys and values of 2 new tokens of \(2, 8\), got"):
        attention(query[:, :1], key[:, :1], key[:, :1], inference_params=params)
    params = te.InferenceParams(2, 8, 2, 8, torch.float32, qkv_format="thd", max_ctx_len=2)
    params.pre_step({"a": 2, "b": 1})
    packed = te.DotProductAttention(
        4, 8, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal"
    )
    tokens = query.new_ones(5, 4, 8), *key.new_ones(2, 5, 2, 8)
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        starts = {name: torch.tensor([0, 3, 5], dtype=torch.int32)}
        with pytest.raises(ValueError, match=rf"gaps, {name} of \[0, 2, 3\] as .* \[0, 3, 5\]"):
            packed(*tokens, inference_params=params, **starts)
        starts[name] = torch.tensor([0, 2, 3], dtype=torch.int32)
        packed(*tokens, inference_params=params, **starts)
    with pytest.raises(ValueError, match="expected qkv_format sbhd or bshd"):
        packed(query[0], key[0], key[0], inference_params=te.InferenceParams(2, 8))


@torch.no_grad()
def test_every_spelling_of_a_causal_mask_ends_at_the_last_key():
    query, key, value = torch.randn(3, 1, 5, 4, 8)
    whole = te.DotProductAttention(4, 8, qkv_format="bshd")(query, key, value)
    for mask_type in ("padding_causal", "padding,causal", "causal, padding"):
        attention = te.DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=mask_type)
        params = te.InferenceParams(1, 8, 4, 8, torch.float32)
        for begin, end in ((0, 4), (4, 5)):
            params.pre_step({"a": end - begin})
            new = (x[:, begin:end] for x in (query, key, value))
            last = attention(*new, inference_params=params)
        torch.testing.assert_close(last, whole[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [None, "same"])
@pytest.mark.parametrize("named", [False, True])
@torch.no_grad()
def test_layers_need_numbers_of_their_own(named, name):
    """Two layers with the same number would read each other's keys."""
    how = {"attn_mask_type": "padding_causal" if named else "causal", "name": name}
    layers = [te.MultiheadAttention(HIDDEN, HEADS, **how) for _ in range(2)]
    cache = (HEADS, HIDDEN // HEADS, torch.float32) if named else ()
    params = te.InferenceParams(1, LONGEST, *cache)

    def step(tokens):
        if named:
            params.pre_step({"a": tokens})
        x = torch.randn(tokens, 1, HIDDEN, device=layers[0].proj.weight.device)
        for layer in layers:
            layer.eval()(x, inference_params=params)
        if not named:
            params.sequence_len_offset += tokens

    step(3)
    with pytest.raises(ValueError, match=r"one layer for each layer_number, got 1 of the layers"):
        step(1)


@torch.no_grad()
def test_numbers_from_zero_are_as_good_as_others():
    """Layer 0 has a cache of its own; a layer without a number has the cache of layer 1."""

    def run(*numbers):
        torch.manual_seed(3)
        how = {"qkv_format": "bshd", "attn_mask_type": "padding_causal"}
        layers = [te.DotProductAttention(2, 8, layer_number=n, **how) for n in numbers]
        params = te.InferenceParams(1, LONGEST, 2, 8, torch.float32)
        for _ in range(3):
            params.pre_step({"a": 1})
            outs = [layer(*torch.randn(3, 1, 1, 2, 8), inference_params=params) for layer in layers]
        return torch.stack(outs)

    assert torch.equal(run(0, 1), run(1, 2))
    with pytest.raises(ValueError, match=r"one layer for each layer_number, got 1 of the layers"):
        run(None, 1)


def test_bad_steps():
    attention = te.DotProductAttention(4, 8, attn_mask_type="padding_causal")
    x = torch.randn(2, 1, 4, 8)
    params = te.InferenceParams(1, 8, 4, 8, torch.float32)
    with pytest.raises(ValueError, match=r"expected pre_step\(.* got no sequences"):
        attention(x, x, x, inference_params=params)
    for steps in (["a"], {"a": 2.0}):
        with pytest.raises(TypeError, match="number of new tokens, an int"):
            params.pre_step(steps)
    layer = te.MultiheadAttention(HIDDEN, HEADS, attn_mask_type="padding_causal", device="cpu")
    params = te.InferenceParams(1, LONGEST, HEADS, HIDDEN // HEADS, torch.float32)
    params.pre_step({"a": 5})
    with pytest.raises(ValueError, match=r"rotary_pos_emb of at least 5 positions, .* \[4, 4\]"):
        layer(
            torch.randn(5, 1, HIDDEN),
            inference_params=params,
            rotary_pos_emb=angles_on("cpu")[:4],
        )


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@torch.no_grad()
def test_too_few_angles_are_counted_from_the_first_token(qkv_format):
    layer, params = make_layer("cpu", qkv_format), te.InferenceParams(5, LONGEST)
    how = {"inference_params": params, "rotary_pos_emb": angles_on("cpu")[:6]}
    layer(torch.randn(5, 5, HIDDEN), **how)
    params.sequence_len_offset += 5
    with pytest.raises(ValueError, match=r"rotary_pos_emb of at least 8 positions, .* got \[6\]"):
        layer(torch.randn(*((5, 3) if qkv_format == "bshd" else (3, 5)), HIDDEN), **how)


def test_a_plain_cache_keeps_its_dtype_and_offsets():
    attention = te.DotProductAttention(4, 8, layer_number=3)
    x = torch.randn(2, 1, 4, 8)
    params = te.InferenceParams(1, 8)
    attention(x, x, x, inference_params=params)
    with pytest.raises(ValueError, match=r"torch.float32, as in the cache of layer number 3"):
        attention(*[x.bfloat16()] * 3, inference_params=params)
    params.sequence_len_offset = -1
    with pytest.raises(ValueError, match=r"expected sequence_len_offset >= 0, got -1"):
        attention(x, x, x, inference_params=params)
    with pytest.raises(ValueError, match=r"expected sequence_len_offset >= 0, got -1"):
        make_layer("cpu", layer_number=4)(
            torch.randn(2, 1, HIDDEN), inference_params=params, rotary_pos_emb=angles_on("cpu")
        )
    params.sequence_len_offset = "1"
    with pytest.raises(TypeError, match=r"expected sequence_len_offset to be an int, got '1'"):
        attention(x, x, x, inference_params=params)
