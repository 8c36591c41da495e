"""Tokens sorted by expert, and back, against loops that define the results."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.moe import chunks, permutation
from transformer_engine.pytorch.moe.chunks import (
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)
from transformer_engine.pytorch.moe.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_unpermute,
)

TOKENS, EXPERTS, HIDDEN = 9, 4, 6


def problem(device="cpu", dtype=torch.float32):
    """Tokens with different numbers of experts, one without any; an expert without tokens."""
    torch.manual_seed(0)
    mask = torch.rand(TOKENS, EXPERTS, device=device) > 0.5
    mask[0], mask[1], mask[:, 2] = False, True, False
    x = torch.randn(TOKENS, HIDDEN, device=device).to(dtype).requires_grad_()
    return x, mask, torch.rand(TOKENS, EXPERTS, device=device).requires_grad_()


def pairs(mask):
    """Expert and token of each row."""
    return [(e, t) for e in range(EXPERTS) for t in range(TOKENS) if mask[t, e]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int32])
@pytest.mark.parametrize("row_count", ["exact", -1, None])
def test_rows_of_a_mask(kind, row_count, device):
    x, mask, probs = problem(device)
    rows = int(mask.sum()) if row_count == "exact" else row_count
    out, weights, _ = moe_permute_with_probs(x, probs, mask.to(kind), rows)
    order = pairs(mask)
    assert torch.equal(out, torch.stack([x[t] for _, t in order]))
    assert torch.equal(weights, torch.stack([probs[t, e] for e, t in order]))
    assert torch.equal(moe_permute(x, mask.to(kind), rows)[0], out)


@pytest.mark.parametrize("rows", [-1, 12])
def test_rows_of_indices(rows, device):
    x, _, _ = problem(device)
    indices = torch.randint(EXPERTS, (TOKENS, 2), device=device, dtype=torch.int32)
    if rows > 0:  # as Megatron marks tokens of experts that are full
        indices[3] = torch.iinfo(torch.int32).max
    out, row_id_map = moe_permute(x, indices, rows, map_type="index")
    order = [(e, t, k) for e in range(EXPERTS) for t in range(TOKENS) for k in range(2)]
    order = [(e, t, k) for e, t, k in order if indices[t, k] == e]
    order = order[: rows if rows > 0 else None]
    assert torch.equal(out, torch.stack([x[t] for _, t, _ in order]))
    probs = torch.rand(TOKENS, 2, device=device)
    merged = moe_unpermute(out, row_id_map, probs, x.shape, map_type="index")
    expected = torch.zeros_like(merged)
    for _, t, k in order:
        expected[t] += x[t].detach() * probs[t, k]
    torch.testing.assert_close(merged, expected)


@pytest.mark.parametrize("weighted", [True, False])
def test_back_again_with_gradients(weighted, device):
    x, mask, probs = problem(device)
    rows, row_id_map = moe_permute(x, mask, int(mask.sum()))
    upstream = torch.randn(TOKENS, HIDDEN, device=device)
    inputs = (x, probs) if weighted else (x,)
    factors = mask * probs if weighted else mask.float()
    # The experts multiply their rows by 2, 3, ...
    layer = torch.tensor([e + 2.0 for e, _ in pairs(mask)], device=device)
    merged = moe_unpermute(rows * layer[:, None], row_id_map, probs if weighted else None, x.shape)
    expected = x * (factors * torch.arange(2.0, 2 + EXPERTS, device=device)).sum(1, keepdim=True)
    torch.testing.assert_close(merged, expected)
    found = torch.autograd.grad(merged, inputs, upstream)
    for one, other in zip(found, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other)


def test_weights_have_gradients(device):
    x, mask, probs = problem(device)
    _, weights, _ = moe_permute_with_probs(x, probs, mask, int(mask.sum()))
    weights.sum().backward()
    assert torch.equal(probs.grad, mask.float())


def test_sums_are_in_fp32(device):
    """256 + 1 + 1 is 258, but in bf16 256 + 1 is 256."""
    mask = torch.ones(1, 3, dtype=torch.bool, device=device)
    x = torch.ones(1, 2, device=device, dtype=torch.bfloat16, requires_grad=True)
    rows, row_id_map = moe_permute(x, mask, 3)
    values = torch.tensor([[256.0], [1.0], [1.0]], device=device).bfloat16().expand(3, 2)
    assert moe_unpermute(values, row_id_map, restore_shape=(1, 2))[0, 0] == 258
    (rows * values).sum().backward()
    assert x.grad.dtype is torch.bfloat16 and x.grad[0, 0] == 258


@pytest.mark.parametrize("probs_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_in_bf16_round_once(probs_dtype, device):
    """Merged tokens, and the gradients of rows, weights and tokens, against fp64."""
    hidden, ulp = 512, 2.0**-7
    torch.manual_seed(2)
    mask = torch.rand(TOKENS, EXPERTS, device=device) > 0.3
    x = torch.randn(TOKENS, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, device=device).to(probs_dtype).requires_grad_()
    upstream = torch.randn(TOKENS, hidden, device=device, dtype=torch.bfloat16)
    rows, row_id_map = moe_permute(x, mask, int(mask.sum()))
    experts = rows.detach() * torch.randn_like(rows).requires_grad_(False)
    experts.requires_grad_()
    merged = moe_unpermute(experts, row_id_map, probs, x.shape)
    grads = torch.autograd.grad(merged, (experts, probs), upstream)
    row_grads = torch.randn_like(rows)
    (x_grad,) = torch.autograd.grad(rows, x, row_grads)

    order = pairs(mask)
    exact = experts.detach().double(), probs.detach().double()
    sums = torch.zeros(TOKENS, hidden, device=device, dtype=torch.float64)
    expected_merged, expected_x = sums.clone(), sums.clone()
    expected = torch.zeros_like(exact[0]), torch.zeros_like(exact[1])
    for row, (e, t) in enumerate(order):
        expected_merged[t] += exact[0][row] * exact[1][t, e]
        expected[0][row] = upstream[t].double() * exact[1][t, e]
        expected[1][t, e] = upstream[t].double() @ exact[0][row]
        expected_x[t] += row_grads[row].double()
    for value, wanted in (
        (merged, expected_merged),
        (x_grad, expected_x),
        *zip(grads, expected, strict=True),
    ):
        # Half a unit in the last place of bf16, and the rounding errors of sums in fp32.
        bound = wanted.abs() * ulp / 2 + 1e-4
        assert ((value.double() - wanted).abs() <= bound).all(), (value, wanted)


def test_no_tokens(device):
    x, mask = torch.ones(0, 4, device=device), torch.ones(0, 2, dtype=torch.bool, device=device)
    rows, row_id_map = moe_permute(x, mask, 0)
    assert rows.shape == (0, 4) and moe_unpermute(rows, row_id_map).shape == (0, 4)


@pytest.mark.parametrize("lists", [True, False])
def test_chunks_in_another_order(lists, device):
    x, _, _ = problem(device)
    weights = torch.rand(TOKENS, device=device, requires_grad=True)
    sizes, order = [2, 0, 4, 3], [3, 1, 0, 2]
    lists_of_sizes = (
        (sizes, order) if lists else (torch.tensor(sizes, device=device), torch.tensor(order))
    )
    rows, sorted_weights = moe_sort_chunks_by_index_with_probs(x, weights, *lists_of_sizes)
    for one, source in ((rows, x), (sorted_weights, weights)):
        parts = source.split(sizes)
        assert torch.equal(one, torch.cat([parts[i] for i in order]))
    assert torch.equal(moe_sort_chunks_by_index(x, *lists_of_sizes), rows)
    back = moe_sort_chunks_by_index(rows, [sizes[i] for i in order], [2, 1, 3, 0])
    assert torch.equal(back, x)
    upstream = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(back, x, upstream)
    assert torch.equal(gradient, upstream)


X, MASK, PROBS = problem()
ROWS, ROW_ID_MAP = moe_permute(X, MASK)
ERRORS = {
    "a kind of map": (
        lambda: moe_permute(X, MASK, map_type="list"),
        ValueError,
        "map_type 'mask' or 'index', got 'list'",
    ),
    "a mask as indices": (
        lambda: moe_permute(X, MASK, map_type="index"),
        TypeError,
        "int32 or int64 with 'index', got torch.bool",
    ),
    "a negative index": (
        lambda: moe_permute(X, torch.arange(-1, 8)[:, None], map_type="index"),
        ValueError,
        "numbers of experts of 0 or more, got -1",
    ),
    "tokens of the map": (lambda: moe_permute(X, MASK[1:]), ValueError, "of 9 tokens, got (8, 4)"),
    "number of rows": (
        lambda: moe_permute(X, MASK, 3),
        ValueError,
        f"num_out_tokens={len(ROWS)}, the ones of the mask, got 3",
    ),
    "rows of three axes": (lambda: moe_permute(X[None], MASK), ValueError, "inp [rows, hidden]"),
    "FP8": (
        lambda: moe_permute(te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(X), MASK),
        TypeError,
        "in high precision, got Float8Tensor",
    ),
    "shape of weights": (
        lambda: moe_permute_with_probs(X, PROBS[:, 0], MASK),
        ValueError,
        "probs of shape (9, 4), as the routing map, got (9,)",
    ),
    "rows of another map": (
        lambda: moe_unpermute(X, ROW_ID_MAP),
        ValueError,
        f"rows [{len(ROWS)}, hidden], as row_id_map says, and restore_shape [tokens, hidden], got "
        "(9, 6) and (9, 6)",
    ),
    "three axes to restore": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, None, [3, 3, 6]),
        ValueError,
        f"restore_shape [tokens, hidden], got {tuple(ROWS.shape)} and (3, 3, 6)",
    ),
    "fewer tokens than the map has": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, None, [2, 6]),
        ValueError,
        f"{1 + int(ROW_ID_MAP[:, 0].max())} or more tokens",
    ),
    "weights of the chosen alone": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS.topk(2).values, X.shape),
        ValueError,
        "4 or more columns of the routing map, got 9 and 2",
    ),
    "chunks of less than no rows": (
        lambda: moe_sort_chunks_by_index(X, [-1, 10], [1, 0]),
        ValueError,
        "sizes that add up to 9, got [-1, 10]",
    ),
    "two names": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS, X.shape, probs=PROBS),
        ValueError,
        "one of merging_probs and probs, got both",
    ),
    "tokens of the weights": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS[1:], X.shape),
        ValueError,
        "merging_probs [9, ...], of the shape of the routing map, got (8, 4)",
    ),
    "indices as a mask": (
        lambda: moe_permute(X, MASK.int().topk(2).indices + 2),
        ValueError,
        "of 0 and 1 with map_type 'mask', got values from 2 to 5; indices of experts are",
    ),
    "a list as map": (
        lambda: moe_permute(X, MASK.tolist()),
        TypeError,
        "[moe_permute] expected routing_map to be a torch.Tensor, got list",
    ),
    "an array as map": (
        lambda: moe_permute_with_probs(X, PROBS, MASK.numpy()),
        TypeError,
        "[moe_permute_with_probs] expected routing_map to be a torch.Tensor, got ndarray",
    ),
    "no weights": (
        lambda: moe_permute_with_probs(X, None, MASK),
        TypeError,
        "expected probs to be a torch.Tensor, got NoneType",
    ),
    "no map of rows": (
        lambda: moe_unpermute(ROWS, None),
        TypeError,
        "[moe_unpermute] expected row_id_map to be a torch.Tensor, got NoneType",
    ),
    "a list of weights": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS.tolist()),
        TypeError,
        "[moe_unpermute] expected merging_probs to be a torch.Tensor, got list",
    ),
    "a list of offsets": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, pad_offsets=[0]),
        TypeError,
        "[moe_unpermute] expected pad_offsets to be a torch.Tensor, got list",
    ),
    "a list of weights of rows": (
        lambda: moe_sort_chunks_by_index_with_probs(X, [0.5] * 9, [8, 1], [1, 0]),
        TypeError,
        "[moe_sort_chunks_by_index] expected probs to be a torch.Tensor, got list",
    ),
    "no sizes": (
        lambda: moe_sort_chunks_by_index(X, None, [1, 0]),
        TypeError,
        "expected split_sizes to be a tensor or a list of integers, got None",
    ),
    **{
        f"chunks {indices}": (
            lambda indices=indices: moe_sort_chunks_by_index(X, [8, 1], indices),
            ValueError,
            f"sorted_index with each index from 0 to 1 once, got {indices}",
        )
        for indices in ([1, 1], [1, 2], [-1, 0])
    },
    **{
        f"{name} of {kind}": (
            lambda sizes=sizes, order=order: moe_sort_chunks_by_index(X, sizes, order),
            TypeError,
            f"expected {name} to be a tensor or a list of integers, got",
        )
        for kind, name, sizes, order in (
            ("fractions", "split_sizes", [1.5, 8.2], [1, 0]),
            ("a tensor of fractions", "split_sizes", torch.tensor([1.5, 8.2]), [1, 0]),
            ("fractions", "sorted_index", [1, 8], [1.2, 0.7]),
            ("bools", "sorted_index", [1, 8], [True, False]),
        )
    },
    "no whole number of rows": (
        lambda: moe_permute(X, MASK, 2.5),
        TypeError,
        "[moe_permute] expected num_out_tokens to be an int, got 2.5",
    ),
    "a map on another device": (
        lambda: moe_permute(X, MASK.to("meta")),
        ValueError,
        "expected routing_map on cpu, where inp is, got meta",
    ),
    "weights on another device": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS.to("meta"), X.shape),
        ValueError,
        "expected merging_probs on cpu, where inp is, got meta",
    ),
    "fractions in the map of rows": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP.float(), PROBS, X.shape),
        TypeError,
        "expected row_id_map of int32 or int64, got torch.float32",
    ),
    "fractions in the offsets": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS, X.shape, pad_offsets=torch.zeros(4)),
        TypeError,
        "expected pad_offsets of int32 or int64, got torch.float32",
    ),
    "rows before the first": (
        lambda: moe_unpermute(ROWS, -ROW_ID_MAP, PROBS, X.shape),
        ValueError,
        "expected row_id_map of 0 or more",
    ),
    "a flat map": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP[:, 0], PROBS, X.shape),
        ValueError,
        "expected row_id_map [rows, 2]",
    ),
    "one size": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, PROBS, 9),
        TypeError,
        "expected restore_shape [tokens, hidden], got 9",
    ),
    "fractions of tokens": (
        lambda: moe_unpermute(ROWS, ROW_ID_MAP, None, [9.0, 6]),
        TypeError,
        "expected sizes of restore_shape to be an int, got 9.0",
    ),
    "sum of sizes": (
        lambda: moe_sort_chunks_by_index(X, [1, 2], [1, 0]),
        ValueError,
        "sizes that add up to 9, got [1, 2]",
    ),
    "number of chunks": (
        lambda: moe_sort_chunks_by_index(X, [9], [1, 0]),
        ValueError,
        "as many sizes as indices of chunks, got (1,) and (2,)",
    ),
    "number of weights": (
        lambda: moe_sort_chunks_by_index_with_probs(X, PROBS, [9], [0]),
        ValueError,
        "probs [9], one for each row, got (9, 4)",
    ),
}


@pytest.mark.parametrize("kind", ["mask", "index"])
def test_weights_tell_the_number_of_tokens(kind):
    tokens, experts = torch.randn(5, 6), torch.tensor([[0, 2], [1, 3], [3, 0], [2, 1], [1, 0]])
    mask = torch.zeros(5, 4, dtype=torch.bool).scatter(1, experts, True)
    rows, row_id_map = moe_permute(tokens, mask if kind == "mask" else experts, map_type=kind)
    probs = torch.rand(5, 4 if kind == "mask" else 2)
    got = moe_unpermute(rows, row_id_map, probs, map_type=kind)
    assert torch.equal(got, moe_unpermute(rows, row_id_map, probs, tokens.shape, kind))
    weights = probs[mask].view(5, 2) if kind == "mask" else probs
    torch.testing.assert_close(got, tokens * weights.sum(1, keepdim=True))


def test_compiled_code_does_not_look_at_the_mask():
    tokens, mask = torch.randn(5, 6), torch.rand(5, 4) > 0.5
    permute = torch.compile(moe_permute, backend="aot_eager", fullgraph=True)
    ones = int(mask.sum())
    for ours, theirs in zip(
        permute(tokens, mask, ones), moe_permute(tokens, mask, ones), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mistake", ERRORS)
def test_bad_arguments(mistake):
    call, kind, text = ERRORS[mistake]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value).startswith("[") and text in str(error.value)


def test_public_names():
    for module in (chunks, permutation):
        for name in module.__all__:
            assert getattr(te, name) is getattr(module, name)
