"""Cases of functions: loss, MoE, rotary embedding, GEMMs, quantizers, padding, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import transformer_engine.pytorch as te
from comparison.bench import PRECISIONS, RECIPES, Bench, Case, Row, pairwise, public
from comparison.findings import tensors_in

DTYPES = ("bf16", "fp32", "fp16")
E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
Run = Callable[[Bench, Row], None]


def _dtype(row: Row) -> torch.dtype:
    return PRECISIONS[row["dtype"]].dtype


def _differentiate(bench: Bench, out: Any, *inputs: torch.Tensor) -> None:
    """Add a result and the gradients of its inputs to the findings."""
    bench.found.add("out", out)
    ends = [x for x in tensors_in(out) if x.requires_grad]
    if ends:
        torch.autograd.backward(ends, [bench.like(x) for x in ends])
    bench.found.add("gradient", [x.grad for x in inputs])


def _cross_entropy(bench: Bench, row: Row) -> None:
    logits = bench.tensor(3, 7, 50, dtype=_dtype(row), grad=True, scale=5)
    target = bench.integers(50, 3, 7)
    target.view(-1)[::5] = -100
    target = target.int() if row["target"] == "int32" else target
    smoothing, reduces = float(row["smoothing"]), row["result"] == "mean"
    _differentiate(bench, te.parallel_cross_entropy(logits, target, smoothing, reduces), logits)


def _permutation(bench: Bench, row: Row) -> None:
    """Each token has two experts, because a sum of two gradients does not depend on their order."""
    tokens, experts = 23, 5
    x = bench.tensor(tokens, 16, dtype=_dtype(row), grad=True)
    probs = bench.tensor(tokens, experts).softmax(1).requires_grad_()
    chosen = bench.tensor(tokens, experts).topk(2).indices
    mask = torch.zeros(tokens, experts, dtype=torch.bool, device=bench.device)
    mask = mask.scatter(1, chosen, True)
    if row["map"] == "index":
        probs = bench.tensor(tokens, 2).softmax(1).requires_grad_()
        rows, row_map = te.moe_permute(x, chosen.int(), map_type="index")
        permuted_probs = None
    elif row["probs"] == "permuted":
        rows, permuted_probs, row_map = te.moe_permute_with_probs(x, probs, mask, 2 * tokens)
    else:
        rows, row_map = te.moe_permute(x, mask, 2 * tokens)
        permuted_probs = None
    merging = probs if row["probs"] == "merging" else None
    out = te.moe_unpermute(rows * 2, row_map, merging, list(x.shape), map_type=row["map"])
    _differentiate(bench, [rows, permuted_probs, out], x, probs)


def _chunks(bench: Bench, row: Row) -> None:
    x = bench.tensor(20, 8, dtype=_dtype(row), grad=True)
    probs = bench.tensor(20, grad=True)
    sizes: Any = [5, 0, 9, 6]
    order: Any = [3, 1, 0, 2]
    if row["sizes"] == "tensors":
        sizes, order = (torch.tensor(s, device=bench.device) for s in (sizes, order))
    both = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    _differentiate(bench, [both, te.moe_sort_chunks_by_index(x, sizes, order)], x, probs)


def _router(bench: Bench, row: Row) -> None:
    modules = ("router", "moe.router")
    topk = int(row["topk"])
    logits = bench.tensor(12, 8, dtype=_dtype(row), grad=True)
    score, early = row["score"].removeprefix("early "), row["score"].startswith("early")
    bias = bench.tensor(8) if row["choice"] == "biased" and score != "softmax" else None
    groups = (4, 2) if row["choice"] == "groups" and topk % 2 == 0 else (None, None)
    choose = public("fused_topk_with_score_function", *modules)
    chosen = choose(logits, topk, early, *groups, 1.5, score, bias)
    compute = public("fused_compute_score_for_moe_aux_loss", *modules)
    mask, scores = compute(logits, topk, score)
    loss = public("fused_moe_aux_loss", *modules)(scores, mask.sum(0), 12, 8, topk, 0.1)
    _differentiate(bench, [chosen, mask, scores, loss], logits)


def _rotation(bench: Bench, row: Row) -> None:
    turn = public("apply_rotary_pos_emb", "attention.rope", "rope")
    interleaved, size = row["pairs"] == "neighbours", 32
    more = {"seq_len_interpolation_factor": 2.0} if row["angles"] == "interpolated" else {}
    share = 0.5 if row["angles"] == "half" else 1.0
    module = te.RotaryPositionEmbedding(size, share, interleaved=interleaved, **more)
    angles = module.to(bench.device)(24)
    lengths = [9, 0, 12, 5]
    shape = {"sbhd": (13, 3), "bshd": (3, 13), "thd": (sum(lengths),)}[row["format"]]
    starts = None
    if row["starts"] == "starts":
        count = len(lengths) if row["format"] == "thd" else 3
        starts = torch.arange(count, dtype=torch.int32, device=bench.device) * 3
    x = bench.tensor(*shape, 2, size, dtype=_dtype(row), grad=True)
    ends = bench.ends(lengths) if row["format"] == "thd" else None
    how = {"start_positions": starts, "interleaved": interleaved}
    _differentiate(bench, turn(x, angles, row["format"], row["by"] == "one kernel", ends, **how), x)


def _product(bench: Bench, row: Row) -> None:
    multiply = public("general_gemm", "cpp_extensions")
    shapes = {"TN": ((48, 64), (32, 64)), "NN": ((64, 48), (32, 64)), "NT": ((64, 48), (64, 32))}
    a, b = (bench.tensor(*shape, dtype=_dtype(row)) for shape in shapes[row["layout"]])
    if row["factors"] == "fp8":
        quantizer = te.Float8CurrentScalingQuantizer(E4M3, device=bench.device)
        a, b = quantizer(a), quantizer(b)
    more: dict[str, Any] = {"layout": row["layout"]}
    if row["more"] == "bias and gelu":
        more |= {"bias": bench.tensor(48, dtype=_dtype(row)), "gelu": True}
    if row["more"] == "accumulated":
        more |= {"out": bench.tensor(32, 48), "accumulate": True, "use_split_accumulator": True}
    bench.found.add("out", [x for x in multiply(a, b, **more) if x is not None])


def _quantizer(bench: Bench, row: Row) -> None:
    kind, power = E5M2 if row["format"] == "E5M2" else E4M3, row["scales"] == "powers of 2"
    sides = {"rowwise": True, "columnwise": row["sides"] == "both"}
    quantizer: Any
    if row["quantizer"] == "delayed":
        amax = torch.zeros(1, device=bench.device)
        scale = torch.full((1,), 4.0 if power else 3.3, device=bench.device)
        quantizer = te.Float8Quantizer(scale, amax, kind, **sides)
    elif row["quantizer"] == "current":
        more = {"device": bench.device, "force_pow_2_scales": power, **sides}
        quantizer = te.Float8CurrentScalingQuantizer(kind, **more)
    else:
        dimensions = 1 if "1D" in row["quantizer"] else 2
        more = {"force_pow_2_scales": power, "block_scaling_dim": dimensions, **sides}
        quantizer = te.Float8BlockQuantizer(kind, **more)
    x = bench.tensor(*map(int, row["shape"].split("x")), dtype=_dtype(row))
    x = x * torch.logspace(-2, 2, x.shape[-1], device=bench.device).to(x.dtype)
    made = quantizer(x)
    bench.found.add("made", made)
    bench.found.add("fp32", made.dequantize(dtype=torch.float32))
    for name in ("_transpose", "_columnwise_data", "_columnwise_scale_inv"):
        if row["sides"] == "both" and isinstance(getattr(made, name, None), torch.Tensor):
            bench.found.add(name, getattr(made, name))
    if row["quantizer"] == "delayed":
        bench.found.add("amax", amax)


def _padding(bench: Bench, row: Row) -> None:
    """Padding before and after two grouped layers, as in a mixture of experts."""
    splits = {"ragged": [5, 0, 21, 16], "even": [16, 32, 0, 16]}[row["rows"]]
    size = None if row["size"] == "usual" else int(row["size"])
    pad, unpad = te.Fp8Padding(4, size), te.Fp8Unpadding(4, size)
    dtype, recipe = _dtype(row), RECIPES[row["recipe"]]
    more = {"device": bench.device, "params_dtype": dtype}
    first = te.GroupedLinear(4, 32, 64, bias=False, name="first", **more)
    second = te.GroupedLinear(4, 64, 32, name="second", **more)
    for step in range(2):
        x = bench.tensor(sum(splits), 32, dtype=dtype, grad=True)
        with bench.scope(PRECISIONS[row["dtype"]], recipe):
            padded, sizes = pad(x, splits)
            out = unpad(second(nn.functional.gelu(first(padded, sizes)), sizes), splits)
        out.backward(bench.like(out))
        bench.found.add(f"step{step}", [padded, sizes, out, x.grad])
    parameters = [*first.parameters(), *second.parameters()]
    bench.found.add("gradient", [p.grad for p in parameters])


def _optimizer(bench: Bench, row: Row) -> None:
    parameters = [nn.Parameter(bench.tensor(*s, dtype=_dtype(row))) for s in ((5, 7), (3,), (16,))]
    rates = {"lr": 0.01, "weight_decay": 0.1 if row["decay"] == "decay" else 0.0}
    optimizer: torch.optim.Optimizer
    if row["optimizer"] == "FusedSGD":
        optimizer = te.optimizers.FusedSGD(parameters, momentum=0.9, **rates)
    else:
        own = {"adam_w_mode": row["optimizer"] == "FusedAdam"}
        own["master_weights"] = row["masters"] == "masters"
        optimizer = te.optimizers.FusedAdam(parameters, **own, **rates)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = bench.like(parameter)
        optimizer.step()
        bench.found.add(f"step{step}", parameters)
    bench.found.add("state", [dict(sorted(optimizer.state[p].items())) for p in parameters])


def _lists(bench: Bench, row: Row) -> None:
    optimizers = te.optimizers
    lists = [bench.tensor(n, dtype=_dtype(row)) for n in (5, 300, 1)]
    flag = torch.zeros(1, dtype=torch.int32, device=bench.device)
    results = [torch.zeros_like(x, dtype=torch.float32) for x in lists]
    call = optimizers.multi_tensor_applier
    norms = call(optimizers.multi_tensor_l2norm, flag, [lists], True)
    call(optimizers.multi_tensor_scale, flag, [lists, results], 0.3)
    bench.found.add("norms", norms)
    bench.found.add("scaled", [*results, flag])


class _Block(nn.Module):
    """A block of torch's layers, which `te.convert` replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(32), nn.RMSNorm(64, eps=1e-6)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call them."""
        return x + self.second(self.last(nn.functional.gelu(self.first(self.norm(x)))))


def _converted(bench: Bench, row: Row) -> None:
    model = nn.Sequential(_Block(), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48)))
    model = model.to(bench.device, _dtype(row))
    te.convert(model, fuse=row["fuse"] == "fused")
    for step in range(2):
        x = bench.tensor(16, 32, dtype=_dtype(row), grad=True)
        with bench.scope(PRECISIONS[row["dtype"]], RECIPES[row["recipe"]]):
            out = model(x)
        out.backward(bench.like(out))
        bench.found.add(f"step{step}", [out, x.grad])
    bench.found.add("gradient", {name: p.grad for name, p in model.named_parameters()})
    bench.found.add("state", dict(model.state_dict()))


FUNCTIONS: dict[str, tuple[Run, dict[str, tuple[str, ...]]]] = {
    "parallel_cross_entropy": (
        _cross_entropy,
        {"smoothing": ("0", "0.2"), "result": ("each", "mean"), "target": ("int64", "int32")},
    ),
    "permutation": (_permutation, {"map": ("mask", "index"), "probs": ("", "permuted", "merging")}),
    "chunks": (_chunks, {"sizes": ("lists", "tensors")}),
    "router": (
        _router,
        {
            "score": ("softmax", "early softmax", "sigmoid", "sqrtsoftplus"),
            "topk": ("1", "2", "4"),
            "choice": ("plain", "biased", "groups"),
        },
    ),
    "rotation": (
        _rotation,
        {
            "format": ("sbhd", "bshd", "thd"),
            "pairs": ("halves", "neighbours"),
            "angles": ("whole", "half", "interpolated"),
            "by": ("one kernel", "torch"),
            "starts": ("from 0", "starts"),
        },
    ),
    "general_gemm": (
        _product,
        {
            "layout": ("TN", "NN", "NT"),
            "factors": ("plain", "fp8"),
            "more": ("", "bias and gelu", "accumulated"),
        },
    ),
    "quantizers": (
        _quantizer,
        {
            "quantizer": ("delayed", "current", "1D blocks", "2D blocks"),
            "format": ("E4M3", "E5M2"),
            "scales": ("any", "powers of 2"),
            "sides": ("rows", "both"),
            "shape": ("48x64", "3x50x144", "256x384"),
        },
    ),
    "padding": (
        _padding,
        {
            "rows": ("ragged", "even"),
            "size": ("usual", "32"),
            "recipe": ("none", "delayed", "current", "blocks"),
        },
    ),
    "optimizers": (
        _optimizer,
        {
            "optimizer": ("FusedAdam", "FusedAdam without W", "FusedSGD"),
            "masters": ("no masters", "masters"),
            "decay": ("no decay", "decay"),
        },
    ),
    "lists of tensors": (_lists, {"": ("",)}),
    "convert": (_converted, {"fuse": ("fused", "apart"), "recipe": ("none", "delayed", "current")}),
}


def _repeats(row: Row) -> bool:
    """Whether results repeat: torch's fused SGD reads undefined memory for 16-bit parameters."""
    return row.get("optimizer") != "FusedSGD" or row["dtype"] == "fp32"


def cases() -> Iterator[Case]:
    """The cases of this file."""
    for name, (run, factors) in FUNCTIONS.items():
        for row in pairwise({**factors, "dtype": DTYPES}, _repeats):
            parts = [part for part in (name, *row.values()) if part]
            yield Case("/".join(parts), lambda bench, run=run, row=row: run(bench, row))
