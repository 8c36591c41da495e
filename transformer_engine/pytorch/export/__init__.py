"""Export of modules to ONNX."""

from transformer_engine.pytorch.export.onnx import (
    is_in_onnx_export_mode,
    onnx_export,
    te_translation_table,
)

__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]
