"""ONNX graphs that are traced on a GPU, with fake tensors in place of tensors on the GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch.export import onnx as onnx_form

pytest.importorskip("onnxscript")


def test_a_graph_for_a_gpu_stays_there():
    """Torch puts the result of an ONNX operator on the CPU; the cast moves it to the GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):  # as torch.export does
        x, inverse = torch.empty(4, 8, device="cuda"), torch.empty((), device="cuda")
        for made in (onnx_form._quantize_dequantize(x, inverse, 5), onnx_form._pinned(x)):
            assert made.device == x.device
