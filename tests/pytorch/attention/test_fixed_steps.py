"""Steps whose offset is on the device give the results of one call; CUDA graphs capture them."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine import _C

HIDDEN, HEADS, LONGEST = 32, 4, 24
BFLOAT16 = {"params_dtype": torch.bfloat16}


def make_layers(device, count=1, qkv_format="bshd", mask="causal", **options):
    torch.manual_seed(3)
    return torch.nn.ModuleList(
        te.TransformerLayer(
            HIDDEN,
            48,
            HEADS,
            num_gqa_groups=2,
            layer_number=i + 1,
            self_attn_mask_type=mask,
            attn_input_format=qkv_format,
            device=device,
            **options,
        )
        for i in range(count)
    ).eval()


def run(layers, x, angles=None, params=None):
    for layer in layers:
        x = layer(x, rotary_pos_emb=angles, inference_params=params)
    return x


def angles_on(device):
    return te.RotaryPositionEmbedding(HIDDEN // HEADS).to(device)(LONGEST)


def offset_on(device, value=0):
    return torch.tensor(value, device=device)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize(("rope", "window"), [(True, None), (False, (3, 0))], ids=str)
@torch.no_grad()
def test_steps_equal_one_call(device, qkv_format, rope, window):
    layers = make_layers(device, 2, qkv_format, window_size=window)
    angles = angles_on(device) if rope else None
    x = torch.randn(3, 11, HIDDEN, device=device)
    tokens = 1 if qkv_format == "bshd" else 0
    x = x if tokens else x.transpose(0, 1).contiguous()
    whole = run(layers, x, angles)
    params = te.InferenceParams(4, LONGEST)
    params.batch_size_offset = 1
    params.sequence_len_offset = offset_on(device)
    parts, begin = [], 0
    for count in (5, 1, 1, 3, 1):
        parts.append(run(layers, x.narrow(tokens, begin, count), angles, params))
        params.sequence_len_offset += count
        begin += count
    torch.testing.assert_close(torch.cat(parts, tokens), whole, rtol=1e-4, atol=1e-5)
    keys, values = params.key_value_memory_dict[1]
    assert keys.shape == values.shape == (LONGEST, 4, 2, HIDDEN // HEADS)
    assert not keys[:, 0].any(), "another sequence's"
    assert not keys[11:].any()
    assert keys[:11, 1:].all()


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@torch.no_grad()
def test_sequences_of_unequal_length(device, qkv_format):
    """Prompts of 5 and 2 tokens are padded; later tokens overwrite the padding."""
    layers, angles = make_layers(device, 2, qkv_format), angles_on(device)
    first = (lambda x: x) if qkv_format == "bshd" else (lambda x: x.transpose(0, 1).contiguous())
    sequences = [torch.randn(1, count, HIDDEN, device=device) for count in (8, 5)]
    prompts = torch.zeros(2, 5, HIDDEN, device=device)
    lengths = [5, 2]
    for prompt, sequence, length in zip(prompts, sequences, lengths, strict=True):
        prompt[:length] = sequence[0, :length]
    params = te.InferenceParams(2, LONGEST)
    run(layers, first(prompts), angles, params)  # causal, so no token sees the padding after it
    params.sequence_len_offset = torch.tensor(lengths, dtype=torch.int32, device=device)
    results = []
    for step in range(3):
        pairs = zip(sequences, lengths, strict=True)
        x = torch.cat([one[:, length + step, None] for one, length in pairs])
        results.append(first(run(layers, first(x), angles, params)))
        params.sequence_len_offset += 1
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        whole = first(run(layers, first(sequence), angles))[0, length:]
        steps = torch.cat([result[i] for result in results])
        torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
@torch.no_grad()
def test_offsets_are_reordered_with_the_caches(device, first):
    layers, lengths = make_layers(device), offset_on(device, [5, 3])
    prompts, token = (torch.randn(2, n, HIDDEN, device=device) for n in (5, 1))
    results = []
    for order in ([0, 1], [1, 0]):
        params = te.InferenceParams(3, LONGEST)
        params.batch_size_offset = first
        run(layers, prompts[order], None, params)
        params.sequence_len_offset = offset = lengths[order]
        if order == [0, 1]:
            params.swap_key_value_dict([*range(first), first + 1, first])
        assert params.sequence_len_offset is offset and offset.tolist() == [3, 5]
        results.append(run(layers, token, None, params))
    torch.testing.assert_close(*results)


@torch.no_grad()
def test_one_query_needs_no_band():
    """Without a mask, a single query sees all tokens that have been written."""
    layers, x = make_layers("cpu", 2, mask="no_mask"), torch.randn(2, 6, HIDDEN)
    results = []
    for offset in (0, offset_on("cpu")):
        params = te.InferenceParams(2, LONGEST)
        params.sequence_len_offset = offset
        for begin, end in ((0, 4), (4, 5), (5, 6)):
            out = run(layers, x[:, begin:end], None, params)
            params.sequence_len_offset += end - begin
        results.append(out)
    torch.testing.assert_close(*results)


def test_mistakes():
    layers, x = make_layers("cpu"), torch.randn(2, 3, HIDDEN)
    params = te.InferenceParams(2, 4)
    for offset, error, message in (
        (torch.tensor(0.0), TypeError, "tensor of int32 or int64, got one of torch.float32"),
        (torch.tensor([0, 0, 0]), ValueError, r"of shape \(\) or \(2,\), .* got \(3,\)"),
        (torch.tensor(2), ValueError, "at most 4 tokens, got 3 behind a sequence_len_offset of 2"),
        (torch.tensor([-1, 0]), ValueError, "behind a sequence_len_offset of -1"),
        (torch.tensor(0, device="meta"), ValueError, "on cpu, where keys are, got meta"),
    ):
        params.sequence_len_offset = offset
        with pytest.raises(error, match=message):
            run(layers, x, None, params)
    params.sequence_len_offset = torch.tensor(0)
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        run(layers, torch.randn(2, 5, HIDDEN), None, params)
    with pytest.raises(ValueError, match="at most 2 sequences, got those from 0 to 3"):
        run(layers, torch.randn(3, 1, HIDDEN), None, params)
    query = torch.randn(1, 1, 4, 8)
    for options, message in (
        ({"attn_mask_type": "padding_causal"}, "expected a causal mask type or no_mask"),
        ({"qkv_format": "thd"}, "expected qkv_format sbhd or bshd"),
    ):
        attention = te.DotProductAttention(4, 8, **options)
        params = te.InferenceParams(2, 4)
        params.sequence_len_offset = torch.tensor(0)
        tensor = query[0] if options.get("qkv_format") else query
        with pytest.raises(ValueError, match=message):
            attention(tensor, tensor, tensor, inference_params=params)


@torch.no_grad()
def test_reset_keeps_the_offset_where_it_is():
    layers, params = make_layers("cpu"), te.InferenceParams(1, 4)
    params.sequence_len_offset = offset = torch.tensor(2)
    run(layers, torch.randn(1, 1, HIDDEN), None, params)
    params.reset()
    assert params.sequence_len_offset is offset
    assert offset == 0


@torch.no_grad()
def test_offsets_that_change_without_their_version():
    """Each step reads the offset again, even if the version of the tensor is the same."""
    layers, x = make_layers("cpu", 2), torch.randn(1, 4, HIDDEN)
    params = te.InferenceParams(1, LONGEST)
    memory = torch.zeros(1, dtype=torch.int64)
    params.sequence_len_offset = memory
    for step in range(4):
        memory.data.fill_(step)  # does not change the version of the tensor
        last = run(layers, x[:, step : step + 1], None, params)
    torch.testing.assert_close(last, run(layers, x)[:, 3:], rtol=1e-4, atol=1e-5)


def test_the_table_knows_fixed_steps():
    sizes = {"batch_size": 2, "max_seqlen_kv": 64, "device": "cpu", "is_training": False}
    how = {"attn_mask_type": "padding", "inference_params": "fixed"}
    table = te.attention_backends(max_seqlen_q=1, **sizes, **how)
    assert table.chosen == "sdpa"


# ---- On a GPU ----


@pytest.mark.gpu
@torch.no_grad()
def test_cudnn_serves_every_step_with_one_graph():
    sizes = {"batch_size": 2, "max_seqlen_kv": LONGEST, "kv_channels": 8, "num_gqa_groups": 2}
    how = {"attn_mask_type": "padding", "inference_params": "fixed", "is_training": False}
    table = te.attention_backends(
        num_attention_heads=HEADS, qkv_format="bshd", max_seqlen_q=1, **sizes, **how
    )
    if table["cudnn"] is not None:
        pytest.skip(f"cudnn {table['cudnn']}")
    layers, angles = make_layers("cuda", 3, **BFLOAT16), angles_on("cuda")
    x = torch.randn(2, 12, HIDDEN, device="cuda", dtype=torch.bfloat16)
    whole = run(layers, x, angles)
    params = te.InferenceParams(2, LONGEST)
    params.sequence_len_offset = offset_on("cuda")
    parts, graphs = [], []
    for step in range(12):
        parts.append(run(layers, x[:, step : step + 1].contiguous(), angles, params))
        params.sequence_len_offset += 1
        graphs.append(_C.attention_graph_count())
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=3e-2, atol=3e-2)
    assert graphs[0] == graphs[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["one offset", "offsets"])
@torch.no_grad()
def test_replays_of_a_step(dtype, each):
    """A step is captured twice at the same offset; neither graph reads tensors of the other."""
    layers, angles = make_layers("cuda", 3, params_dtype=dtype), angles_on("cuda")
    x = torch.randn(2, 12, HIDDEN, device="cuda", dtype=dtype)
    token = x[:, :1].clone()

    def start():
        params = te.InferenceParams(2, LONGEST)
        params.sequence_len_offset = offset_on("cuda", [0, 0] if each else 0)
        return params

    params = start()
    eager = []
    for step in range(12):
        eager.append(run(layers, x[:, step : step + 1].contiguous(), angles, params))
        params.sequence_len_offset += 1
    params = start()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(layers, token, angles, params)
    torch.cuda.current_stream().wait_stream(stream)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append(run(layers, token, angles, params))
    for step in range(12):
        token.copy_(x[:, step : step + 1])
        graphs[step % 2].replay()
        assert torch.equal(outs[step % 2], eager[step]), step
        params.sequence_len_offset += 1


@pytest.mark.parametrize("same_step", [True, False])
def test_training_after_inference_mode(device, same_step):
    """Training reads what inference mode has made: tables of an earlier step, or the same step."""
    layers = [
        te.MultiheadAttention(
            *(HIDDEN, HEADS),
            layer_number=i + 1,
            softmax_type="off-by-one",
            attention_dropout=0.0,
            device=device,
        )
        for i in range(2)
    ]
    x = torch.randn(7, 3, HIDDEN, device=device)  # a new shape, so tables are made here
    params = te.InferenceParams(3, LONGEST + same_step)
    params.sequence_len_offset = offset_on(device)
    with torch.inference_mode():
        layers[0](x, inference_params=params)
    if not same_step:
        params = te.InferenceParams(3, LONGEST)
        params.sequence_len_offset = offset_on(device)
    x.requires_grad_()
    out = layers[1](x, inference_params=params, checkpoint_core_attention=True)
    out.sum().backward()
    assert x.grad.any()
