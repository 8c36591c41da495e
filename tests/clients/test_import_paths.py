"""Import paths that other programs use, and how they ask whether a name exists."""

import importlib
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from packaging.version import Version

import transformer_engine as te

# {module: names}: further modules that export names of `te.common.recipe` and `te.pytorch`.
PATHS = {
    "transformer_engine.common.recipe": (
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
    ),
    "transformer_engine.pytorch.attention": (
        "DotProductAttention",
        "InferenceParams",
        "MultiheadAttention",
        "RotaryPositionEmbedding",
    ),
    "transformer_engine.pytorch.attention.dot_product_attention": ("DotProductAttention",),
    "transformer_engine.pytorch.attention.inference": ("InferenceParams",),
    "transformer_engine.pytorch.attention.multi_head_attention": ("MultiheadAttention",),
    "transformer_engine.pytorch.attention.rope": ("RotaryPositionEmbedding",),
    "transformer_engine.pytorch.cpu_offload": ("ManualOffloadSynchronizer", "mark_not_offload"),
    "transformer_engine.pytorch.cross_entropy": ("parallel_cross_entropy",),
    "transformer_engine.pytorch.distributed": ("CudaRNGStatesTracker", "checkpoint"),
    "transformer_engine.pytorch.float8_tensor": ("Float8Tensor",),
    "transformer_engine.pytorch.graph": ("make_graphed_callables",),
    "transformer_engine.pytorch.fp8": (
        "autocast",
        "fp8_autocast",
        "is_fp8_available",
        "is_fp8_block_scaling_available",
        "is_mxfp8_available",
        "is_nvfp4_available",
    ),
    "transformer_engine.pytorch.module": (
        "Fp8Padding",
        "Fp8Unpadding",
        "GroupedLinear",
        "LayerNorm",
        "LayerNormLinear",
        "LayerNormMLP",
        "Linear",
        "RMSNorm",
        "destroy_ub",
        "initialize_ub",
    ),
    "transformer_engine.pytorch.module.grouped_linear": ("GroupedLinear",),
    "transformer_engine.pytorch.module.layernorm": ("LayerNorm",),
    "transformer_engine.pytorch.module.layernorm_linear": ("LayerNormLinear",),
    "transformer_engine.pytorch.module.layernorm_mlp": ("LayerNormMLP",),
    "transformer_engine.pytorch.module.linear": ("Linear",),
    "transformer_engine.pytorch.module.rmsnorm": ("RMSNorm",),
    "transformer_engine.pytorch.permutation": (
        "moe_permute",
        "moe_permute_and_pad_with_probs",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
    ),
    "transformer_engine.pytorch.quantization": ("autocast",),
    "transformer_engine.pytorch.quantized_tensor": (
        "QuantizedTensor",
        "QuantizedTensorStorage",
        "Quantizer",
        "prepare_for_saving",
        "restore_from_saved",
    ),
    "transformer_engine.pytorch.tensor": ("Float8Tensor", "QuantizedTensor", "Quantizer"),
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": (
        "Float8BlockQuantizer",
        "Float8BlockwiseQTensor",
    ),
    "transformer_engine.pytorch.tensor.float8_tensor": ("Float8Quantizer", "Float8Tensor"),
    "transformer_engine.pytorch.tensor.quantized_tensor": ("QuantizedTensor",),
    "transformer_engine.pytorch.tensor.storage": ("Float8TensorStorage",),
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": ("Float8TensorStorage",),
    "transformer_engine.pytorch.transformer": ("TransformerLayer",),
    "transformer_engine.pytorch.utils": ("get_cudnn_version", "get_device_compute_capability"),
    "transformer_engine_torch": ("DType",),
}
# {module: names} that are not at the top of `transformer_engine.pytorch`.
MORE = {
    "transformer_engine.pytorch.attention": (
        "apply_fused_qkv_rotary_pos_emb",
        "apply_rotary_pos_emb",
    ),
    "transformer_engine.pytorch.attention.dot_product_attention": ("_attention_backends",),
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention": (
        "DotProductAttention",
        "_attention_backends",
    ),
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel": (
        "generate_positional_ids_for_cp",
        "get_batch_on_this_cp_rank",
        "pad_thd_sequences_for_cp",
    ),
    "transformer_engine.pytorch.attention.dot_product_attention.utils": (
        "AttentionParams",
        "get_attention_backend",
    ),
    "transformer_engine.pytorch.attention.inference": (
        "KVCacheManager",
        "NonPagedKVCacheManager",
        "PagedKVCacheManager",
    ),
    "transformer_engine.pytorch.attention.rope": (
        "apply_fused_qkv_rotary_pos_emb",
        "apply_rotary_pos_emb",
    ),
    "transformer_engine.pytorch.constants": (
        "AttnBiasTypes",
        "AttnMaskTypes",
        "AttnTypes",
        "GemmParallelModes",
        "LayerTypes",
        "TE_DType",
        "dist_group_type",
    ),
    "transformer_engine.pytorch.cpp_extensions": ("general_gemm",),
    "transformer_engine.pytorch.cpp_extensions.fused_attn": ("FusedAttnBackend",),
    "transformer_engine.pytorch.cpu_offload": ("get_cpu_offload_context",),
    "transformer_engine.pytorch.distributed": (
        "activation_recompute_forward",
        "allreduce",
        "gather_along_first_dim",
        "get_all_rng_states",
        "get_distributed_rank",
        "get_distributed_world_size",
        "in_fp8_activation_recompute_phase",
        "is_fp8_activation_recompute_enabled",
        "prepare_te_modules_for_fsdp",
        "reduce_scatter_along_first_dim",
        "set_all_rng_states",
    ),
    "transformer_engine.pytorch.export": ("is_in_onnx_export_mode", "te_translation_table"),
    "transformer_engine.pytorch.fp8": (
        "DelayedScaling",
        "FP8GlobalStateManager",
        "Format",
        "Recipe",
        "check_fp8_block_scaling_support",
        "check_fp8_support",
        "check_mxfp8_support",
        "check_nvfp4_support",
        "get_default_fp8_recipe",
    ),
    "transformer_engine.pytorch.graph": (
        "is_graph_capturing",
        "restore_fp8_tensors",
        "save_fp8_tensors",
        "set_capture_end",
        "set_capture_start",
    ),
    "transformer_engine.pytorch.jit": ("jit_fuser", "no_torch_dynamo"),
    "transformer_engine.pytorch.module.base": (
        "TransformerEngineBaseModule",
        "get_dummy_wgrad",
        "get_workspace",
    ),
    "transformer_engine.pytorch.module.layernorm_linear": ("general_gemm",),
    "transformer_engine.pytorch.module.linear": ("general_gemm",),
    "transformer_engine.pytorch.ops": (
        "AddExtraInput",
        "AllReduce",
        "BasicLinear",
        "ConstantScale",
        "Dropout",
        "FusibleOperation",
        "GroupedLinear",
        "Linear",
        "MakeExtraOutput",
        "Quantize",
        "ReduceScatter",
        "ScaledClampedQGeGLU",
        "ScaledSReLU",
        "ScaledSwiGLU",
        "Sequential",
        "SwiGLU",
    ),
    "transformer_engine.pytorch.optimizers": (
        "FusedAdam",
        "FusedSGD",
        "multi_tensor_applier",
        "multi_tensor_l2norm",
        "multi_tensor_scale",
        "multi_tensor_scale_tensor",
    ),
    "transformer_engine.pytorch.quantization": (
        "FP8GlobalStateManager",
        "check_fp8_block_scaling_support",
        "check_fp8_support",
        "get_default_fp8_recipe",
    ),
    "transformer_engine.pytorch.router": ("fused_topk_with_score_function", "fused_moe_aux_loss"),
    "transformer_engine.pytorch.utils": (
        "attention_mask_func",
        "cast_if_needed",
        "divide",
        "get_default_init_method",
        "init_method_normal",
        "is_bf16_compatible",
        "make_weak_ref",
        "nvtx_range_pop",
        "nvtx_range_push",
        "requires_grad",
        "round_up_to_nearest_multiple",
        "scaled_init_method_normal",
    ),
    "transformer_engine.debug": ("set_weight_tensor_tp_group_reduce",),
    "transformer_engine.debug.features.api": ("TEConfigAPIMapper", "TransformerEngineAPI"),
    "transformer_engine.debug.features.utils": ("next_enabled_iter",),
    "transformer_engine.debug.pytorch.debug_state": ("TEDebugState",),
    "nvdlfw_inspect.base": ("BaseConfigAPIMapper", "BaseNamespaceAPI"),
    "nvdlfw_inspect.config_manager": ("ConfigManager", "ConfigSpec", "is_layer_in_cfg"),
    "nvdlfw_inspect.debug_features.generic_feature_api": ("GenericConfigAPIMapper",),
    "nvdlfw_inspect.debug_features.log_tensor_stats": ("LogTensorStats",),
    "nvdlfw_inspect.logging": ("BaseLogger", "MetricLogger", "get_logger", "print_rank_0"),
    "nvdlfw_inspect.registry": ("Registry", "api_method"),
    "nvdlfw_inspect.utils": ("append_parent_docstring", "gather_along_first_dim"),
    "transformer_engine_torch": ("thd_get_partitioned_indices",),
}


@pytest.mark.parametrize("module", PATHS)
def test_every_path_gives_the_same_objects(module: str) -> None:
    home = te.common.recipe if module == "transformer_engine.common.recipe" else te.pytorch
    for name in PATHS[module]:
        assert getattr(importlib.import_module(module), name) is getattr(home, name)


@pytest.mark.parametrize("module", MORE)
def test_names_below_the_top(module: str) -> None:
    for name in MORE[module]:
        assert hasattr(importlib.import_module(module), name)


def test_nothing_warns_where_warnings_are_errors() -> None:
    """`import transformer_engine` makes subpackages attributes, and no path is deprecated."""
    lines = [
        "import transformer_engine as te",
        "te.pytorch, te.common.recipe, te.pytorch.module, te.pytorch.distributed",
        "te.pytorch.fp8, te.pytorch.constants, te.pytorch.cpp_extensions, te.pytorch.attention",
        "te.pytorch.tensor, te.pytorch.quantization, te.pytorch.ops",
        *(f"import {module}" for module in sorted({*PATHS, *MORE})),
    ]
    code = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_that_are_not_implemented_are_absent() -> None:
    """Programs find this out by `try: from ... import ...` or `hasattr`."""
    for name in ("NVFP4Quantizer", "MXFP8Tensor", "FusedMLAQUpProjRopeQuant"):
        assert not hasattr(te.pytorch, name)
    for name in ("OperationFuser", "BasicOperation", "FusedOperation", "fused"):
        assert not hasattr(te.pytorch.ops, name)
    for module in ("tensor.mxfp8_tensor", "newton_schulz", "ep"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"transformer_engine.pytorch.{module}")
    assert not hasattr(te.common.recipe, "MXFP8BlockScaling")


def test_an_import_that_fails_answers_hasattr(tmp_path: object) -> None:
    """With a broken torch, `hasattr` returns False, and an import raises the reason."""
    lines = [
        "import sys; sys.modules['torch'] = None",
        "import transformer_engine as te",
        "assert not hasattr(te, 'pytorch')",
        "import transformer_engine.pytorch",
    ]
    code = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: import of torch halted" in done.stderr


def test_distribution_is_found_under_both_spellings() -> None:
    for name in ("transformer-engine", "transformer_engine"):
        assert Version(metadata.version(name)) >= Version("2.9.0")
        assert metadata.metadata(name)["Name"] == "transformer-engine"
    assert Version(te.__version__).release >= (2, 9)


def test_module_identity() -> None:
    """Some programs look at the module of a class, others at its name."""
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"):
        kind = getattr(te.pytorch, name)
        assert kind.__name__ == name and "transformer_engine.pytorch" in kind.__module__


def test_hardware_questions() -> None:
    fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
    assert fp8.check_fp8_support() == te.pytorch.is_fp8_available(return_reason=True)
    for check, ask in (
        (fp8.check_mxfp8_support, te.pytorch.is_mxfp8_available),
        (fp8.check_nvfp4_support, te.pytorch.is_nvfp4_available),
    ):
        available, reason = check()
        assert ask() is available is False and "not implemented" in reason
        assert ask(return_reason=True) == (available, reason)
    assert te.pytorch.is_bf16_available() is True


def test_dtypes_of_the_native_module() -> None:
    constants = importlib.import_module("transformer_engine.pytorch.constants")
    tex = importlib.import_module("transformer_engine_torch")
    assert constants.TE_DType[torch.bfloat16] is tex.DType.kBFloat16
    assert constants.TE_DType[torch.float8_e4m3fn] is tex.DType.kFloat8E4M3
    assert te.pytorch.DType.kFloat8E5M2 == tex.DType.kFloat8E5M2
