"""The built-in features of `transformer_engine`: importing this registers all of them."""

from transformer_engine.debug.features import (  # noqa: F401 - for their effect
    api,
    disable_fp8_gemm,
    disable_fp8_layer,
    dump_tensors,
    fake_quant,
    log_fp8_tensor_stats,
    log_tensor_stats,
    per_tensor_scaling,
)
