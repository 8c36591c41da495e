"""Megatron-Core with our layers: a GPT that trains in FP8, and parts of it.

On the CPU Megatron needs learned positions: its rotary ones ask for the current CUDA device.
"""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rulers import assert_bitwise, assert_equal

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

pytest.importorskip("megatron.core", reason="python -m pip install --no-deps megatron-core")

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Megatron emits many
    pytest.mark.filterwarnings("ignore:DelayedScaling. ignoring unknown keyword:UserWarning"),
]

VOCABULARY, LENGTH, BATCH = 128, 32, 2


@pytest.fixture
def megatron(device: str, tmp_path: Path) -> Iterator[Any]:
    """Megatron's process groups, with this process as the only rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    store = dist.FileStore(str(tmp_path / "store"), 1)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    yield parallel_state
    random.get_cuda_rng_tracker().reset()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt(device: str, fused_mlp: bool = False, **changes: Any) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    if device == "cuda":
        random.model_parallel_cuda_manual_seed(0)  # seeds the weights
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    settings = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": device == "cpu",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 4,
        "fp8_amax_compute_algo": "max",
    }
    experts = changes.get("num_moe_experts")
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts,
        moe_grouped_gemm=experts is not None,
        qk_layernorm=True,
        use_te_op_fuser=fused_mlp,
    )
    position = "learned_absolute" if device == "cpu" else "rope"
    model = GPTModel(
        TransformerConfig(**{**settings, **changes}),
        spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type=position,
    )
    return model.to(device)


def trained(model: torch.nn.Module, device: str, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(LENGTH, device=device).repeat(BATCH, 1)
    losses = []
    for _ in range(steps):
        model.set_is_first_microbatch()
        loss = model(ids, ids[:1], None, labels=ids).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_gpt_trains_in_fp8(recipe: str, device: str, megatron: Any) -> None:
    model = gpt(device, fp8_recipe=recipe)
    assert sys.modules["megatron.core.extensions.transformer_engine"].HAVE_TE
    layer = model.decoder.layers[0]
    for module, kind in (
        (layer.self_attention.linear_qkv, te.LayerNormLinear),
        (layer.self_attention.linear_proj, te.Linear),
        (layer.self_attention.core_attention, te.DotProductAttention),
        (layer.self_attention.q_layernorm, te.RMSNorm),
    ):
        assert isinstance(module, kind)
    te.gemm_report(reset=True)
    losses = trained(model, device)
    assert losses == sorted(losses, reverse=True)
    # Two layers have four Linears each, with three GEMMs in each of four steps.
    assert te.gemm_report().total("fp8") == te.gemm_report().total() == 2 * 4 * 3 * 4


WITH_BIAS = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
}


@pytest.mark.parametrize("changes", [{}, WITH_BIAS], ids=["swiglu", "biases"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", None])
def test_an_mlp_of_operations_trains_alike(
    recipe: str | None, changes: dict[str, Any], device: str, megatron: Any
) -> None:
    """Trains with `--use-transformer-engine-op-fuser`.

    Its GELU is the tanh approximation, Megatron's is not. FP8 turns this difference into other
    codes, so the bound is larger.
    """
    precision = {"fp8": None} if recipe is None else {"fp8_recipe": recipe}
    plain = gpt(device, **precision, **changes)
    model = gpt(device, fused_mlp=True, **precision, **changes)
    assert type(model.decoder.layers[0].mlp).__name__ == "TEFusedMLP"
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    expected = trained(plain, device)
    te.gemm_report(reset=True)
    losses = trained(model, device)
    products = 2 * 4 * 3 * 4
    assert te.gemm_report().total("fp8") == (0 if recipe is None else products)
    assert te.gemm_report().total() == products
    bound = 5e-3 if recipe and changes else 1e-5
    assert losses == pytest.approx(expected, rel=bound if device == "cpu" else 2e-2)
    assert gpt(device, **precision, **changes).load_state_dict(model.state_dict()) == ([], [])


def test_recomputed_layers_change_no_loss(device: str, megatron: Any) -> None:
    """Megatron recomputes layers by `te.checkpoint`; here under delayed scaling."""
    plain = trained(gpt(device), device)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
    te.gemm_report(reset=True)
    assert trained(gpt(device, **recompute, recompute_num_layers=1), device) == plain
    forwards = [n for (_, gemm, _), n in te.gemm_report().counts.items() if gemm == "fprop"]
    assert set(forwards) == {2 * 4}


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
def test_recomputed_outputs_change_no_bit(
    recipe: Recipe, device: str, megatron: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class behind `recompute_modules=["mla_up_proj"]`, which recomputes from a tensor hook."""
    from megatron.core.tensor_parallel import random

    if device == "cpu":
        monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **how: None)
        monkeypatch.setattr(random, "_set_cuda_rng_state", lambda state, **how: None)
    x = torch.randn(16, 64, device=device)
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        up = te.Linear(64, 96, device=device)
        for factor in (1, 2):
            leaf = (factor * x).requires_grad_()
            with te.fp8_autocast(fp8_recipe=recipe):
                checkpoint = random.CheckpointWithoutOutput(fp8="hybrid")
                out = checkpoint.checkpoint(up, leaf) if recompute else up(leaf)
                loss = out.square().sum()
                if recompute:
                    checkpoint.discard_output_and_register_recompute(loss)
            loss.backward()
            found.append([loss, leaf.grad, up.weight.grad.clone(), up.get_extra_state()])
    assert_equal(found[0] + found[1], found[2] + found[3])


def test_a_checkpoint_goes_on_bit_for_bit(device: str, megatron: Any) -> None:
    source, target = gpt(device), gpt(device)
    trained(source, device, 2)
    assert target.load_state_dict(source.state_dict(), strict=True) == ([], [])
    assert trained(target, device, 2) == trained(source, device, 2)


def test_offloaded_layers_change_no_loss(device: str, megatron: Any) -> None:
    offload = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    model = gpt(device, **offload, cpu_offloading_weights=False)
    assert trained(model, device) == trained(gpt(device), device)


def test_weights_are_clipped_by_the_largest_scores(device: str, megatron: Any) -> None:
    """Megatron's `qk_clip`, which asks attention for `return_max_logit`."""
    plain = trained(gpt(device), device, 1)
    model = gpt(device, qk_clip=True, qk_clip_threshold=0.5)
    assert trained(model, device, 1) == plain
    attention = model.decoder.layers[0].self_attention
    largest = attention.core_attention.current_max_attn_logits
    assert largest.shape == (4,) and largest.max() > 0.5
    before = attention.linear_qkv.weight.detach().clone()
    for layer in model.decoder.layers:
        layer.self_attention.clip_qk()
    assert not torch.equal(before, attention.linear_qkv.weight)
    assert attention.core_attention.current_max_attn_logits is None


def test_fused_losses_and_permutations_are_the_plain_ones(device: str, megatron: Any) -> None:
    from megatron.core import tensor_parallel
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.transformer.moe import moe_utils

    torch.manual_seed(0)
    tokens = torch.randn(10, 16, device=device)
    probs = torch.rand(10, 4, device=device)
    routed = probs > 0.5
    count = int(routed.sum())
    found = []
    for fused in (False, True):
        rows, weights, places = moe_utils.permute(tokens, routed, probs * routed, count, fused)
        back = moe_utils.unpermute(rows, places, tokens.shape, probs * routed, routed, fused)
        moved = moe_utils.sort_chunks_by_idxs(
            tokens, torch.tensor([3, 7]), torch.tensor([1, 0]), probs[:, 0], fused
        )
        found.append([rows, weights, back, *moved])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    logits, labels = torch.randn(6, 2, 32, device=device), torch.randint(32, (6, 2), device=device)
    group = megatron.get_tensor_model_parallel_group()
    torch.testing.assert_close(
        extension.te_parallel_cross_entropy(logits, labels, group),
        tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), labels),
    )


def test_experts_train_in_fp8(device: str, megatron: Any) -> None:
    """Trains Megatron's MLP of four experts without its router, which asks for a CUDA device."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}
    model = gpt(device, **experts, fp8_recipe="tensorwise")
    mlp = model.decoder.layers[0].mlp.experts
    assert isinstance(mlp.linear_fc1, te.GroupedLinear) and mlp.linear_fc1.num_gemms == 4
    dtype = mlp.linear_fc1.weight0.dtype
    tokens = torch.tensor([5, 0, 16, 11])
    x = torch.randn(32, 64, device=device, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    te.gemm_report(reset=True)
    losses = []
    for _ in range(3):
        with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
            out, _ = mlp(x, tokens, torch.full((32,), 0.5, device=device))
        loss = (out.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert out.shape == x.shape and x.grad.isfinite().all()
    assert losses == sorted(losses, reverse=True)
    # Two Linears have four experts each, with three GEMMs in each of three steps.
    assert te.gemm_report().total("fp8") == te.gemm_report().total() == 2 * 4 * 3 * 3
    other = gpt(device, **experts, fp8_recipe="tensorwise").decoder.layers[0].mlp.experts
    assert other.load_state_dict(mlp.state_dict(), strict=True) == ([], [])
    assert_bitwise(other.linear_fc1.weight3, mlp.linear_fc1.weight3)


@pytest.mark.parametrize("param", [False, True])
@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_entries_of_experts_in_distributed_checkpoints(
    name: str, param: bool, device: str, megatron: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert has an entry with FP8 state, which loads without unpickling.

    Megatron can write checkpoint files only on GPUs, so the entries pass through `torch.save`.
    """
    settings = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}
    settings |= {"fp8_recipe": name, "fp8_param": param}
    recipe = DelayedScaling() if name == "delayed" else Float8CurrentScaling()
    x = torch.linspace(-1, 1, 32 * 64, device=device).view(32, 64)

    def results(mlp: torch.nn.Module) -> list[torch.Tensor]:
        found = []
        for factor in (1, 3):
            tokens, probs = torch.tensor([5, 0, 16, 11]), torch.full((32,), 0.5, device=device)
            mlp.linear_fc1.is_first_microbatch = mlp.linear_fc2.is_first_microbatch = True
            with te.fp8_autocast(fp8_recipe=recipe):
                out, _ = mlp((factor * x).to(mlp.linear_fc1.weight0.dtype), tokens, probs)
            out.float().square().mean().backward()
            found.append(out.detach())
        return found

    source, target = (gpt(device, **settings).decoder.layers[0].mlp.experts for _ in range(2))
    results(source)
    for layer in (source.linear_fc1, target.linear_fc1):
        monkeypatch.setattr(type(layer), "_decode_extra_state", None)
    groups = {"dp_cp_group": megatron.get_data_parallel_group(with_context_parallel=True)}
    entries = source.sharded_state_dict(metadata=groups)
    assert "linear_fc1._extra_state3" in entries
    saved = io.BytesIO()
    torch.save({key: entry.data for key, entry in entries.items()}, saved)
    saved.seek(0)
    assert target.load_state_dict(torch.load(saved, weights_only=True), strict=True) == ([], [])
    assert_bitwise(target.linear_fc1.get_extra_state(), source.linear_fc1.get_extra_state())
    assert_equal(results(target), results(source))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", None])
def test_its_cuda_graphs_train_as_eager_layers(recipe: str | None, megatron: Any) -> None:
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    fp8 = {"fp8_recipe": recipe} if recipe else {"fp8": None}
    microbatches.init_num_microbatches_calculator(0, None, BATCH, BATCH, 1)
    try:
        model = gpt("cuda", cuda_graph_impl="transformer_engine", **fp8)
        model.zero_grad_buffer = model.zero_grad  # a method of Megatron's wrapper
        TECudaGraphHelper([model], model.config, LENGTH, BATCH).create_cudagraphs()
    finally:
        microbatches.destroy_num_microbatches_calculator()
    assert all(len(layer.cuda_graphs) == 1 for layer in model.decoder.layers)
    model.zero_grad()
    assert trained(model, "cuda") == pytest.approx(trained(gpt("cuda", **fp8), "cuda"), rel=1e-3)
