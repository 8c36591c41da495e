"""Routing of tokens to experts, against a definition for one token at a time."""

import math

import pytest
import torch

from transformer_engine.pytorch.moe.permutation import moe_permute
from transformer_engine.pytorch.moe.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

TOKENS, EXPERTS = 12, 8


def scores_of(row: list[float], function: str) -> list[float]:
    if function == "softmax":
        total = sum(math.exp(x) for x in row)
        return [math.exp(x) / total for x in row]
    if function == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    return [math.sqrt(math.log1p(math.exp(x))) for x in row]


def best(values: list[float], count: int, among: set[int] | None = None) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return [i for i in order if among is None or i in among][:count]


def by_definition(
    row: list[float], topk: int, case: dict, bias: list[float], scale: float
) -> dict[int, float]:
    function, early = case["score_function"], case.get("use_pre_softmax", False)
    late = function == "softmax" and not early
    scores = row if late else scores_of(row, function)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    among = None
    if case.get("num_groups"):
        groups, top_groups = case["num_groups"], case["group_topk"]
        size = EXPERTS // groups
        values = [
            sum(sorted(choice[g * size : (g + 1) * size])[-(topk // top_groups) :])
            for g in range(groups)
        ]
        among = {e for g in best(values, top_groups) for e in range(g * size, (g + 1) * size)}
    chosen = best(choice, topk, among)
    weights = [scores[e] for e in chosen]
    if late:
        weights = scores_of(weights, "softmax")
    elif function != "softmax" and topk > 1:
        weights = [w / sum(weights) for w in weights]
    return {e: w * scale for e, w in zip(chosen, weights, strict=True)}


CASES = {
    "softmax": {"score_function": "softmax"},
    "pre_softmax": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "biased": {"score_function": "sigmoid", "biased": True},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus", "biased": True},
    "groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "biased": True},
}


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_choice_and_weights(case: dict, topk: int, device: str) -> None:
    if topk % (case.get("group_topk") or 1):
        pytest.skip("topk is not a multiple of group_topk")
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.randn(EXPERTS) if case.get("biased") else None
    weights, chosen = fused_topk_with_score_function(
        logits.to(device),
        topk,
        case.get("use_pre_softmax", False),
        case.get("num_groups"),
        case.get("group_topk"),
        1.5,
        case["score_function"],
        None if bias is None else bias.to(device),
    )
    assert chosen.dtype is torch.bool and weights.dtype is logits.dtype
    plain_bias = [0.0] * EXPERTS if bias is None else bias.tolist()
    for token, row in enumerate(logits.tolist()):
        expected = by_definition(row, topk, case, plain_bias, 1.5)
        assert set(chosen[token].nonzero().flatten().tolist()) == set(expected)
        for expert in range(EXPERTS):
            got = weights[token, expert].item()
            assert got == pytest.approx(expected.get(expert, 0.0), rel=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case: dict) -> None:
    """Gradients agree with finite differences, in which the choice of experts stays the same."""
    logits = torch.linspace(-2, 2, EXPERTS).roll(3).repeat(2, 1).requires_grad_()

    def loss(values: torch.Tensor) -> torch.Tensor:
        weights, _ = fused_topk_with_score_function(
            values,
            2,
            case.get("use_pre_softmax", False),
            case.get("num_groups"),
            case.get("group_topk"),
            None,
            case["score_function"],
        )
        return (weights * torch.arange(EXPERTS)).sum()

    loss(logits).backward()
    step = torch.randn(2, EXPERTS) * 1e-2
    moved = loss(logits.detach() + step) - loss(logits.detach() - step)
    assert moved.item() / 2 == pytest.approx((logits.grad * step).sum().item(), rel=2e-2, abs=1e-4)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_and_balance(function: str, device: str) -> None:
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16)
    chosen, scores = fused_compute_score_for_moe_aux_loss(logits.to(device), 2, function)
    assert scores.dtype is torch.float32 and chosen.sum(1).tolist() == [2] * TOKENS
    for row, got in zip(logits.tolist(), scores.tolist(), strict=True):
        expected = scores_of(row, function)
        assert got == pytest.approx([x / sum(expected) for x in expected], rel=1e-5)
    counts = chosen.sum(0)
    loss = fused_moe_aux_loss(scores, counts, TOKENS, EXPERTS, 2, 0.1)
    sums = scores.double().sum(0) * counts
    assert loss.item() == pytest.approx(0.1 * EXPERTS / (2 * TOKENS**2) * sums.sum().item())
    assert fused_moe_aux_loss(scores[:0], 0 * counts, 0, EXPERTS, 2, 0.1).item() == 0.0
    many = (1 << 16, torch.tensor(1 << 16, dtype=torch.int32, device=device))
    losses = [fused_moe_aux_loss(scores, counts, count, EXPERTS, 2, 0.1) for count in many]
    assert torch.equal(*losses)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_indices_and_maps(kind: torch.dtype, device: str) -> None:
    """The chosen experts as indices, which `moe_permute` takes, and as a bitmap."""
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, 13, device=device, requires_grad=True)
    case = (logits, 3, False, None, None, 2.0, "sigmoid")
    weights, chosen = fused_topk_with_score_function(*case)
    room = torch.empty(TOKENS, 3, device=device, dtype=kind)
    again, indices = fused_topk_with_score_function(*case, topk_indices=room)
    assert indices.data_ptr() == room.data_ptr()
    assert torch.equal(again, weights)
    assert torch.equal(torch.zeros_like(chosen).scatter(1, room.long(), True), chosen)
    upstream = torch.randn_like(weights)
    grads = [torch.autograd.grad(one, logits, upstream)[0] for one in (again, weights)]
    assert torch.equal(*grads) and grads[0].any()
    x = torch.randn(TOKENS, 4, device=device)
    rows = [
        moe_permute(x, m, 3 * TOKENS, map_type=t)[0] for m, t in ((chosen, "mask"), (room, "index"))
    ]
    assert torch.equal(*rows)

    bits = fused_topk_with_score_function(*case, routing_map_format="bitmap_u8")[1]
    assert bits.dtype is torch.uint8 and bits.shape == (TOKENS, 2)
    places = torch.arange(13, device=device)
    assert torch.equal((bits[:, places // 8] >> (places % 8).byte() & 1).bool(), chosen)
    of_scores = fused_compute_score_for_moe_aux_loss(logits, 3, "sigmoid", "bitmap_u8")[0]
    assert torch.equal(of_scores, bits)
    for wrong, error, message in (
        ({"topk_indices": room.float()}, TypeError, "of int32 or int64, got torch.float32"),
        ({"topk_indices": room[:, :2]}, ValueError, r"of shape \(12, 3\), got \(12, 2\)"),
        ({"routing_map_format": "bits"}, ValueError, "'bytemap' or 'bitmap_u8', got 'bits'"),
    ):
        with pytest.raises(error, match=message):
            fused_topk_with_score_function(*case, **wrong)


def test_refusals() -> None:
    logits = torch.randn(4, 8)

    def route(logits: torch.Tensor, topk: int, function: str, *groups: int, bias=None):
        groups = groups or (None, None)
        fused_topk_with_score_function(logits, topk, False, *groups, None, function, bias)

    with pytest.raises(ValueError, match="one of sigmoid, softmax, sqrtsoftplus, got 'tanh'"):
        route(logits, 2, "tanh")
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        route(logits.double(), 2, "softmax")
    with pytest.raises(ValueError, match="topk from 1 to 8, got 9"):
        route(logits, 9, "softmax")
    with pytest.raises(ValueError, match="num_groups=3, group_topk=2"):
        route(logits, 2, "sigmoid", 3, 2)
    with pytest.raises(ValueError, match="expected num_groups with group_topk 2, got None"):
        route(logits, 2, "sigmoid", None, 2)
    with pytest.raises(ValueError, match="num_groups=0, group_topk=0"):
        route(logits, 2, "sigmoid", 0, 0)
    with pytest.raises(ValueError, match="num_groups=8, group_topk=2"):
        route(logits, 4, "sigmoid", 8, 2)
    with pytest.raises(TypeError, match=r"expected topk to be an int, got 2\.0"):
        route(logits, 2.0, "sigmoid")
    for shape in ((1,), (7,), (4, 1)):
        with pytest.raises(ValueError, match=r"expected expert_bias of shape \(8,\), one for each"):
            route(logits, 2, "sigmoid", bias=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"tokens_per_expert of shape \(8,\).* got \(1,\)"):
        fused_moe_aux_loss(logits, torch.ones(1), 4, 8, 2, 0.1)
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        route(logits.long(), 2, "sigmoid")
    with pytest.raises(ValueError, match="no expert_bias"):
        route(logits, 2, "softmax", bias=torch.zeros(8))
    with pytest.raises(TypeError, match=r"\[router\] expected logits to be .*, got list"):
        route(logits.tolist(), 2, "softmax")
    with pytest.raises(TypeError, match=r"expected tokens_per_expert to be .*, got list"):
        fused_moe_aux_loss(logits, [4] * 8, 4, 8, 2, 0.1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_groups": "2", "group_topk": 1}, TypeError, "num_groups to be an int, got '2'"),
        ({"num_groups": 2.0, "group_topk": 1}, TypeError, r"num_groups to be an int, got 2\.0"),
        ({"scaling_factor": "2"}, TypeError, "scaling_factor to be a number, got '2'"),
        ({"logits": torch.tensor(1.0), "topk": 1}, ValueError, r"\[tokens, experts\], got .* \(\)"),
        ({"topk_indices": [[0, 1]]}, TypeError, "topk_indices to be a torch.Tensor, got list"),
        ({"expert_bias": torch.zeros(8, device="meta")}, ValueError, "expert_bias on cpu, .* meta"),
    ],
)
def test_arguments_of_another_type(changes, error, message) -> None:
    own = {"logits": torch.randn(4, 8), "topk": 2, "use_pre_softmax": False, "num_groups": None}
    own |= {"group_topk": None, "scaling_factor": None, "score_function": "sigmoid", **changes}
    with pytest.raises(error, match=rf"^\[router\] expected .*{message}"):
        fused_topk_with_score_function(**own)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"probs": torch.ones(8)}, ValueError, r"probs \[tokens, experts\], got \(8,\)"),
        ({"topk": 0}, ValueError, "topk >= 1, got 0"),
        ({"coeff": "1"}, TypeError, "coeff to be a number, got '1'"),
        ({"total_num_tokens": None}, TypeError, "total_num_tokens to be a number, got None"),
        ({"total_num_tokens": torch.ones(2)}, ValueError, r"to be one number, .* \(2,\)"),
    ],
)
def test_arguments_of_the_loss(changes, error, message) -> None:
    own = {"probs": torch.ones(4, 8), "tokens_per_expert": torch.ones(8), "total_num_tokens": 4}
    with pytest.raises(error, match=rf"^\[router\] expected .*{message}"):
        fused_moe_aux_loss(**own | {"num_experts": 8, "topk": 2, "coeff": 0.1} | changes)


@pytest.mark.parametrize("total", [0, torch.tensor(0)])
def test_no_tokens_have_no_loss(total) -> None:
    assert fused_moe_aux_loss(torch.ones(0, 8), torch.zeros(8), total, 8, 2, 0.1) == 0


@pytest.mark.parametrize("lowest", [-200.0, -math.inf])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_logits_whose_scores_vanish_have_no_gradient(function: str, lowest: float) -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    logits[:, 5:] = lowest
    logits.requires_grad_()
    weights, _ = fused_topk_with_score_function(logits, 2, True, None, None, None, function)
    _, scores = fused_compute_score_for_moe_aux_loss(logits, 2, function)
    (weights.square().sum() + scores.square().sum()).backward()
    assert logits.grad.isfinite().all() and not logits.grad[:, 5:].any()
    assert logits.grad[:, :5].any()
