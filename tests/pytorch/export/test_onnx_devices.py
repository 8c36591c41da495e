"""Graphs of ONNX that are traced on a GPU; fake tensors stand for what is there."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch.export import onnx as onnx_form

pytest.importorskip("onnxscript")


def test_a_graph_for_a_gpu_stays_there():
    """What torch makes for an operator of ONNX lies on the CPU: the cast takes it back."""
    with FakeTensorMode(allow_non_fake_inputs=True):  # as torch.export does
        x, inverse = torch.empty(4, 8, device="cuda"), torch.empty((), device="cuda")
        for made in (onnx_form._quantize_dequantize(x, inverse, 5), onnx_form._pinned(x)):
            assert made.device == x.device
