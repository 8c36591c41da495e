"""`convert`: the layers of a torch model replaced by ours, and back."""

from transformer_engine.pytorch.convert.convert import ConversionReport, convert

__all__ = ["ConversionReport", "convert"]
