"""Steps of training and inference in which the host never waits for the GPU."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from debug_session import debugging, section

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)
from transformer_engine.pytorch.router import fused_topk_with_score_function

pytestmark = pytest.mark.gpu

HIDDEN, HEADS, TOKENS, BATCH = 128, 4, 64, 2
RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
Step = Callable[[], object]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _layer(**options: object) -> te.TransformerLayer:
    return te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, params_dtype=torch.bfloat16, **options)


@pytest.fixture
def no_waits() -> Callable[[Step], None]:
    """Returns a function that runs a step three times; the last one raises if the host waits."""

    def run(step: Step) -> None:
        step()
        step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    return run


def _trained(
    model: torch.nn.Module,
    recipe: Recipe | None,
    forward: Callable[[], torch.Tensor],
    capturable: bool = False,
) -> Step:
    weights = [*model.parameters()]
    optimizer = te.optimizers.FusedAdam(weights, master_weights=True, capturable=capturable)

    def step() -> None:
        with te.autocast(recipe is not None, recipe=recipe or DelayedScaling()):
            loss = forward().float().square().mean()
        loss.backward()
        optimizer.step(grad_factor=te.optimizers.clip_factor(weights, 1.0)[1])
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("precision", "fp8_weights"),
    [(name, fp8) for name in RECIPES for fp8 in (False, True) if not fp8 or RECIPES[name]],
)
def test_training(no_waits, precision: str, fp8_weights: bool) -> None:
    recipe = RECIPES[precision]
    with te.quantized_model_init(fp8_weights, recipe=recipe or DelayedScaling()):
        model = torch.nn.Sequential(_layer(), _layer())
    x = _x(TOKENS, BATCH, HIDDEN)
    no_waits(_trained(model, recipe, lambda: model(x), capturable=fp8_weights))


def test_loss_scaling(no_waits) -> None:
    model, x = te.LayerNormMLP(HIDDEN, HIDDEN), _x(TOKENS, HIDDEN).detach().float()
    scaler = torch.amp.GradScaler()
    optimizer = te.optimizers.FusedAdam(model.parameters(), capturable=True)

    def step() -> None:
        with te.autocast(recipe=DelayedScaling()):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    no_waits(step)


def test_session_of_the_debugger(no_waits, tmp_path: Path) -> None:
    layer, x = _layer(), _x(TOKENS, BATCH, HIDDEN)
    stats = section("LogTensorStats", tensors=["activation", "gradient"], stats=["max", "std"])
    with debugging(tmp_path, stats):
        step = _trained(layer, DelayedScaling(), lambda: layer(x))
        no_waits(lambda: (step(), debug_api.step()))


@pytest.mark.parametrize("mask", ["causal", "padding", "padding_causal"])
def test_masks(no_waits, mask: str) -> None:
    layer, x = _layer(self_attn_mask_type=mask, attn_input_format="bshd"), _x(BATCH, TOKENS, HIDDEN)
    lengths = torch.tensor([TOKENS, TOKENS // 2], device="cuda")
    masked = torch.arange(TOKENS, device="cuda") >= lengths[:, None]
    attention_mask = None if mask == "causal" else masked[:, None, None]
    no_waits(_trained(layer, DelayedScaling(), lambda: layer(x, attention_mask=attention_mask)))


ATTENTION: dict[str, dict[str, Any]] = {
    "window": {"window_size": (16, 0)},
    "ALiBi": {"core_attention_bias_type": "alibi"},
    "dropout": {"attention_dropout": 0.1},
    "off by one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "fp8": {},
}


@pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend")
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(no_waits, kind: str) -> None:
    options = dict(ATTENTION[kind])
    bias = options.pop("core_attention_bias_type", "no_bias")
    own = {
        name: options.pop(name) for name in ("attention_dropout", "softmax_type") if name in options
    }
    attention = te.DotProductAttention(HEADS, 128, qkv_format="bshd", **own)
    q, k, v = (_x(BATCH, 128, HEADS, 128) for _ in range(3))
    recipe = DelayedScaling(fp8_dpa=kind == "fp8")

    def step() -> None:
        with te.autocast(recipe=recipe):
            y = attention(
                q, k, v, attn_mask_type="causal", core_attention_bias_type=bias, **options
            )
        y.sum().backward()

    no_waits(step)


def test_lengths_and_positions(no_waits) -> None:
    layer = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=2,
        params_dtype=torch.bfloat16,
        attn_mask_type="padding_causal",
        qkv_format="bshd",
        attention_dropout=0.0,
    )
    x, starts = (
        _x(BATCH, TOKENS, HIDDEN),
        torch.tensor([0, 40, 90], device="cuda", dtype=torch.int32),
    )
    how = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    how["rotary_pos_emb"] = te.RotaryPositionEmbedding(HIDDEN // HEADS)(TOKENS)
    no_waits(_trained(layer, DelayedScaling(), lambda: layer(x, **how)))


def test_packed_sequences(no_waits) -> None:
    attention = te.DotProductAttention(HEADS, HIDDEN // HEADS, qkv_format="thd")
    q, k, v = (_x(BATCH * TOKENS, HEADS, HIDDEN // HEADS) for _ in range(3))
    starts = torch.tensor([0, 40, BATCH * TOKENS], device="cuda", dtype=torch.int32)
    how = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "attn_mask_type": "padding_causal"}
    how |= {"max_seqlen_q": 96, "max_seqlen_kv": 96}
    no_waits(lambda: attention(q, k, v, **how).sum().backward())


@pytest.mark.parametrize("precision", RECIPES)
def test_experts(no_waits, precision: str) -> None:
    recipe, tokens, experts = RECIPES[precision], BATCH * TOKENS, 4
    up = te.GroupedLinear(experts, HIDDEN, HIDDEN, params_dtype=torch.bfloat16)
    router = torch.nn.Linear(HIDDEN, experts, device="cuda", dtype=torch.bfloat16)
    x, splits = _x(tokens, HIDDEN), [2 * tokens // experts] * experts

    def forward() -> torch.Tensor:
        probs, chosen = fused_topk_with_score_function(
            router(x), 2, False, None, None, None, "softmax"
        )
        rows, weights, places = te.moe_permute_with_probs(x, probs, chosen, 2 * tokens)
        y = up(rows, splits) * weights.unsqueeze(-1)
        return te.moe_unpermute(y, places, restore_shape=(tokens, HIDDEN))

    no_waits(_trained(torch.nn.ModuleList([up, router]), recipe, forward))


@pytest.mark.parametrize(
    "kind", ["te.checkpoint", "torch", "head", "RMSNorm swiglu", "compiled", "operations"]
)
def test_others(no_waits, kind: str) -> None:
    layer, x = _layer(), _x(TOKENS, BATCH, HIDDEN)
    words = torch.randint(512, (TOKENS, BATCH), device="cuda")
    head = te.Linear(HIDDEN, 512, bias=False, params_dtype=torch.bfloat16)
    if kind == "RMSNorm swiglu":
        layer = _layer(normalization="RMSNorm", activation="swiglu", num_gqa_groups=2)
    again = torch.utils.checkpoint.checkpoint
    operations = te.ops.Sequential(
        te.ops.RMSNorm(HIDDEN), te.ops.Linear(HIDDEN, HIDDEN), te.ops.GELU()
    )
    compiled = torch.compile(layer, backend="aot_eager")
    forwards = {
        "compiled": lambda: compiled(x),
        "operations": lambda: operations(x.float()),
        "te.checkpoint": lambda: te.checkpoint(layer, x),
        "torch": lambda: again(layer, x, use_reentrant=False),
        "head": lambda: te.linear_cross_entropy(layer(x), head.weight, words),
        "RMSNorm swiglu": lambda: layer(x),
    }
    no_waits(_trained(torch.nn.ModuleList([layer, head]), DelayedScaling(), forwards[kind]))


@pytest.mark.parametrize("cache", ["plain", "without pages", "paged", "packed"])
def test_generation(no_waits, cache: str) -> None:
    packed = {"qkv_format": "thd", "max_ctx_len": 1} if cache == "packed" else {}
    layer = _layer(attn_input_format=packed.get("qkv_format", "bshd"), layer_number=1).eval()
    size = {"num_heads_kv": HEADS, "head_dim_k": HIDDEN // HEADS, "dtype": torch.bfloat16}
    paging = {"is_paged": True, "page_size": 64} if cache == "paged" else {}
    options = {} if cache == "plain" else size | paging | packed
    params = te.InferenceParams(BATCH, 256, **options)
    mask = "causal" if cache == "plain" else "padding_causal"
    x = _x(BATCH, HIDDEN).detach() if packed else _x(BATCH, 1, HIDDEN).detach()
    names = iter([[0, 1], [1, 2], [2, 3]])  # a sequence ends, another one begins

    @torch.no_grad()
    def step() -> None:
        if cache != "plain":
            params.pre_step(dict.fromkeys(next(names), 1))
        layer(x, inference_params=params, self_attn_mask_type=mask)
        params.sequence_len_offset += 1

    no_waits(step)
