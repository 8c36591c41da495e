"""Routing of tokens to experts: the experts of each token, their weights, and the balancing loss.

All functions are compositions of torch operations in fp32, on any device, so autograd computes
their gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from transformer_engine.pytorch.dtypes import HIGH_PRECISION
from transformer_engine.pytorch.module.arguments import check_numbers, check_sizes
from transformer_engine.pytorch.module.inputs import check_devices, check_integers, check_tensors

__all__ = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

_LEAST_SUM = 1e-20  # keeps weights finite where all scores vanish


def _sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """The root of softplus; its gradient is 0, not NaN, where softplus underflows to 0."""
    values = torch.nn.functional.softplus(logits)
    above = values > 0
    return values.where(above, 1.0).sqrt().where(above, 0.0)


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sqrtsoftplus": _sqrt_softplus,
}


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None = None,
    routing_map_format: str = "bytemap",
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights.

    Args:
        logits: `[tokens, experts]`, fp32, fp16 or bf16.
        topk: experts of each token.
        use_pre_softmax: softmax over all experts, before the choice; else over the chosen experts.
        num_groups: experts form this many groups of equal size; needed with `group_topk` only.
        group_topk: choose experts from this many groups only: those groups whose best
            `topk // group_topk` experts have the largest sum. None: from all experts.
        scaling_factor: multiplies the weights; None is 1.
        score_function: `"softmax"`, `"sigmoid"` or `"sqrtsoftplus"`; the weights of the latter two
            are divided by their sum if `topk` is above 1.
        expert_bias: `[experts]`, added to scores for the choice only, not to weights; not with
            `"softmax"`.
        routing_map_format: format of `chosen`: `"bytemap"` is bool `[tokens, experts]`;
            `"bitmap_u8"` is uint8 `[tokens, ceil(experts / 8)]`, with eight experts in a byte, the
            first in the lowest bit.
        topk_indices: int32 or int64 `[tokens, topk]`, to be filled with the experts of each token,
            as `moe_permute` takes them with `map_type="index"`.

    Returns:
        `(weights, chosen)`: `[tokens, experts]` in the dtype of `logits`, zero where not chosen,
        and which experts are chosen; `(weights, topk_indices)` if `topk_indices` is given.

    Raises:
        ValueError: fp64, an unknown score function or format, or numbers that do not fit.
        TypeError: `logits`, `expert_bias` or `topk_indices` that are not tensors; `logits` of
            integers; numbers of another type; `topk_indices` that are not integers.

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax")[1]
    tensor([[False,  True,  True]])
    """
    softmax = score_function == "softmax"
    _check(logits, topk, score_function, routing_map_format)
    if softmax and expert_bias is not None:
        raise ValueError("[router] expected no expert_bias with score_function 'softmax'")
    if expert_bias is not None:
        _check_experts("expert_bias", expert_bias, logits.shape[-1])
        check_devices("router", logits=logits, expert_bias=expert_bias)
    values = logits.float()
    scores = values if softmax and not use_pre_softmax else _SCORES[score_function](values)
    choice = scores if expert_bias is None else scores + expert_bias.float()
    if group_topk is not None:
        if num_groups is None:
            raise ValueError(f"[router] expected num_groups with group_topk {group_topk}, got None")
        check_sizes("router", None, 0, num_groups=num_groups, group_topk=group_topk)
        choice = _within_groups(choice, topk, num_groups, group_topk)
    indices = choice.topk(topk, dim=-1).indices
    weights = scores.gather(-1, indices)
    if softmax and not use_pre_softmax:
        weights = torch.softmax(weights, dim=-1)
    elif not softmax and topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    if scaling_factor is not None:
        check_numbers("router", None, scaling_factor=scaling_factor)
        weights = weights * scaling_factor
    spread = torch.zeros_like(values).scatter(-1, indices, weights)
    probs = spread.to(logits.dtype)
    if topk_indices is not None:
        _check_indices(topk_indices, indices)
        return probs, topk_indices.copy_(indices)
    return probs, _chosen(values, indices, routing_map_format)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: str = "bytemap"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores that the balancing loss reads.

    Args:
        logits: `[tokens, experts]`.
        topk: experts of each token.
        score_function: `"softmax"`, `"sigmoid"` or `"sqrtsoftplus"`; scores of the latter two are
            divided by their sum over the experts.
        routing_map_format: format of `chosen`, see `fused_topk_with_score_function`.

    Returns:
        `(chosen, scores)`: which experts are chosen, and fp32 `[tokens, experts]`.

    Raises:
        ValueError: fp64, an unknown score function or format, or `topk` that does not fit.
        TypeError: `logits` that are not a tensor, or of integers.
    """
    _check(logits, topk, score_function, routing_map_format)
    scores = _SCORES[score_function](logits.float())
    if score_function != "softmax":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return _chosen(scores, scores.topk(topk, dim=-1).indices, routing_map_format), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """A loss that is smallest if tokens are spread evenly over the experts.

    Args:
        probs: `[tokens, experts]`, scores.
        tokens_per_expert: `[experts]`, how many tokens chose each expert.
        total_num_tokens: the number of tokens of all ranks.
        num_experts: number of experts.
        topk: experts of each token.
        coeff: weight of this loss.

    Returns:
        A scalar in the dtype of `probs`: `coeff * num_experts / (topk * total_num_tokens^2)` times
        the sum over experts of (sum of `probs` over tokens) * `tokens_per_expert`; 0 without
        tokens.

    Raises:
        ValueError: another number of `tokens_per_expert` than of experts; `probs` of another shape;
            `topk` below 1; several total numbers.
        TypeError: `probs` or `tokens_per_expert` is not a tensor; numbers of another type.
    """
    check_tensors("router", probs=probs)
    if probs.ndim != 2:
        raise ValueError(f"[router] expected probs [tokens, experts], got {tuple(probs.shape)}")
    check_sizes("router", None, num_experts=num_experts, topk=topk)
    check_numbers("router", None, coeff=coeff)
    _check_experts("tokens_per_expert", tokens_per_expert, probs.shape[-1])
    sums = probs.float().sum(dim=0) * tokens_per_expert.float()
    tokens: int | torch.Tensor
    if isinstance(total_num_tokens, torch.Tensor):
        if total_num_tokens.numel() != 1:
            raise ValueError(
                "[router] expected total_num_tokens to be one number, got a tensor of shape"
                f" {tuple(total_num_tokens.shape)}"
            )
        tokens = total_num_tokens.double().clamp(min=1)  # may be on a GPU
    else:
        check_numbers("router", None, total_num_tokens=total_num_tokens)
        tokens = max(1, total_num_tokens)
    factor = coeff * num_experts / (topk * tokens * tokens)
    return (sums.sum() * factor).to(probs.dtype)


def _check(logits: torch.Tensor, topk: int, score_function: str, map_format: str) -> None:
    check_tensors("router", logits=logits)
    if map_format not in ("bytemap", "bitmap_u8"):
        raise ValueError(
            f"[router] expected routing_map_format 'bytemap' or 'bitmap_u8', got {map_format!r}"
        )
    if score_function not in _SCORES:
        raise ValueError(
            f"[router] expected score_function to be one of {', '.join(_SCORES)}, got "
            f"{score_function!r}"
        )
    if logits.dtype not in HIGH_PRECISION:
        kind = ValueError if logits.dtype is torch.float64 else TypeError
        raise kind(f"[router] expected logits of float32, float16 or bfloat16, got {logits.dtype}")
    if not logits.ndim:
        raise ValueError("[router] expected logits [tokens, experts], got a tensor of shape ()")
    check_sizes("router", None, 0, topk=topk)
    if not 1 <= topk <= logits.shape[-1]:
        raise ValueError(f"[router] expected topk from 1 to {logits.shape[-1]}, got {topk}")


def _within_groups(choice: torch.Tensor, topk: int, groups: int, group_topk: int) -> torch.Tensor:
    """The scores, with minus infinity for experts of groups that are not among the best."""
    experts = choice.shape[-1]
    fits = 1 <= group_topk <= groups and not experts % groups and not topk % group_topk
    if not fits or topk // group_topk > experts // groups:
        raise ValueError(
            f"[router] expected {experts} experts in equal groups and topk {topk} from equally "
            f"many of each, got num_groups={groups}, group_topk={group_topk}"
        )
    grouped = choice.unflatten(-1, (groups, experts // groups))
    best = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
    chosen_groups = _chosen(best, best.topk(group_topk, dim=-1).indices)
    return grouped.masked_fill(~chosen_groups.unsqueeze(-1), float("-inf")).flatten(-2)


def _check_experts(name: str, values: torch.Tensor, experts: int) -> None:
    check_tensors("router", **{name: values})
    if values.shape != (experts,):
        raise ValueError(
            f"[router] expected {name} of shape ({experts},), one for each expert, got"
            f" {tuple(values.shape)}"
        )


def _check_indices(room: torch.Tensor, indices: torch.Tensor) -> None:
    check_integers("router", topk_indices=room)
    if room.shape != indices.shape:
        raise ValueError(
            f"[router] expected topk_indices of shape {tuple(indices.shape)}, got"
            f" {tuple(room.shape)}"
        )


def _chosen(like: torch.Tensor, indices: torch.Tensor, map_format: str = "bytemap") -> torch.Tensor:
    chosen = torch.zeros_like(like, dtype=torch.bool).scatter(-1, indices, True)
    if map_format == "bytemap":
        return chosen
    padded = torch.nn.functional.pad(chosen.byte(), (0, -chosen.shape[-1] % 8))
    bits = padded.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8, device=like.device)
    return bits.sum(-1, dtype=torch.uint8)
