"""Documented import paths of names that are defined elsewhere, made from one table.

For example, `from transformer_engine.pytorch.graph import make_graphed_callables` works although
there is no file `graph.py`. A path of an existing module gets the listed names in addition.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "transformer_engine.pytorch"
_GEMM = {"general_gemm": "cpp_extensions.gemm"}

_STORAGES = {
    "Float8BlockwiseQTensorStorage": "float8_blockwise_tensor_storage",
    "Float8TensorStorage": "float8_tensor_storage",
}

# Path: {name: where it is defined}, both relative to the package.
IMPORT_PATHS: dict[str, dict[str, str]] = {
    "attention.dot_product_attention": {"_attention_backends": "attention.attention_params"},
    "attention.dot_product_attention.context_parallel": dict.fromkeys(
        (
            "generate_positional_ids_for_cp",
            "get_batch_on_this_cp_rank",
            "pad_thd_sequences_for_cp",
        ),
        "attention.context.batches",
    ),
    "attention.dot_product_attention.dot_product_attention": {
        "DotProductAttention": "attention.dot_product_attention",
        "_attention_backends": "attention.attention_params",
    },
    "attention.dot_product_attention.utils": dict.fromkeys(
        ("AttentionParams", "get_attention_backend"), "attention.attention_params"
    ),
    "attention.inference": {
        "InferenceParams": "attention.cache.inference",
        "KVCacheManager": "attention.cache.kv_cache",
        **dict.fromkeys(
            ("NonPagedKVCacheManager", "PagedKVCacheManager"), "attention.cache.managers"
        ),
    },
    "cpp_extensions.fused_attn": {"FusedAttnBackend": "attention.attention_params"},
    "cpu_offload": {
        "get_cpu_offload_context": "offload.cpu_offload",
        "ManualOffloadSynchronizer": "offload.manual",
        "mark_not_offload": "offload.context",
    },
    "float8_tensor": {"Float8Tensor": "tensor.float8_tensor"},
    "graph": {
        "make_graphed_callables": "cuda_graphs.callables",
        **dict.fromkeys(
            (
                "is_graph_capturing",
                "restore_fp8_tensors",
                "save_fp8_tensors",
                "set_capture_end",
                "set_capture_start",
            ),
            "cuda_graphs.saved_scaling",
        ),
    },
    "jit": dict.fromkeys(("jit_fuser", "no_torch_dynamo"), "utils"),
    "module": {
        **dict.fromkeys(("Fp8Padding", "Fp8Unpadding"), "module.fp8_padding"),
        **dict.fromkeys(("destroy_ub", "initialize_ub"), "chain.user_buffers"),
    },
    "module.base": {
        **dict.fromkeys(("get_dummy_wgrad", "get_workspace"), "cpp_extensions.gemm"),
        **dict.fromkeys(
            ("UserBufferQuantizationMode", "destroy_ub", "initialize_ub"), "chain.user_buffers"
        ),
    },
    "module.layernorm_linear": _GEMM,
    "module.linear": _GEMM,
    "permutation": {
        "moe_permute_and_pad_with_probs": "moe.padding",
        **dict.fromkeys(
            ("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"), "moe.chunks"
        ),
        **dict.fromkeys(
            ("moe_permute", "moe_permute_with_probs", "moe_unpermute"), "moe.permutation"
        ),
    },
    "quantization": dict.fromkeys(
        (
            "FP8GlobalStateManager",
            "QuantizerRole",
            "autocast",
            "check_fp8_block_scaling_support",
            "check_fp8_support",
            "check_mxfp8_support",
            "check_nvfp4_support",
            "fp8_autocast",
            "get_align_size_for_quantization",
            "get_default_fp8_recipe",
            "get_default_recipe",
            "is_fp8_available",
            "is_fp8_block_scaling_available",
            "is_mxfp8_available",
            "is_nvfp4_available",
            "quantized_model_init",
        ),
        "fp8",
    ),
    "quantized_tensor": {
        "QuantizedTensor": "tensor.quantized_tensor",
        "QuantizedTensorStorage": "tensor",
        "Quantizer": "fp8.casts.quantizers",
        "prepare_for_saving": "tensor.saving",
        "restore_from_saved": "tensor.saving",
    },
    "router": dict.fromkeys(
        (
            "fused_compute_score_for_moe_aux_loss",
            "fused_moe_aux_loss",
            "fused_topk_with_score_function",
        ),
        "moe.router",
    ),
    "tensor.storage": dict.fromkeys(_STORAGES, "tensor"),
    **{f"tensor.storage.{file}": {name: "tensor"} for name, file in _STORAGES.items()},
    "transformer": {"TransformerLayer": "layers.transformer_layer"},
}


def install() -> None:
    """Make every path of the table importable."""
    for path, names in IMPORT_PATHS.items():
        module = _module(f"{_PACKAGE}.{path}")
        for name, home in names.items():
            defined_in = importlib.import_module(f"{_PACKAGE}.{home}")
            setattr(module, name, getattr(defined_in, name))


def _module(path: str) -> ModuleType:
    """The module at a path, made where no file defines it."""
    if path in sys.modules:
        return sys.modules[path]
    module = ModuleType(path, "A documented import path; see `transformer_engine.pytorch._compat`.")
    module.__spec__ = ModuleSpec(path, loader=None)
    module.__package__, _, name = path.rpartition(".")
    sys.modules[path] = module
    setattr(sys.modules[module.__package__], name, module)
    return module
