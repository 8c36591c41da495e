"""What `onnx_export` refuses, with errors that name the layer."""

import pytest
import torch
from onnx_graphs import FFN, HEADS, HIDDEN, RECIPES, Calls, error_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # raised by torch itself
    pytest.mark.filterwarnings("ignore:.*in training mode.*:UserWarning"),
]


def test_what_cannot_be_exported():
    x = torch.randn(8, 2, HIDDEN)
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", name="block")
    message = error_of(layer, (x,))
    assert "hidden_dropout=0.1 in training cannot be exported: call model.eval()" in message
    assert "(layer block)" in message

    heads = torch.randn(8, HEADS, 16)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = te.DotProductAttention(HEADS, 16, qkv_format="thd", name="core").eval()
    call = Calls((packed, {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 8}))
    assert "qkv_format 'thd' cannot be exported" in error_of(call, (heads, heads, heads))

    cached = te.DotProductAttention(HEADS, 16, qkv_format="sbhd", layer_number=1).eval()
    call = Calls((cached, {"inference_params": te.InferenceParams(2, 8)}))
    batch = torch.randn(8, 2, HEADS, 16)
    message = error_of(call, (batch, batch, batch))
    assert "inference_params cannot be exported" in message

    parallel = te.DotProductAttention(HEADS, 16, qkv_format="sbhd").eval()
    parallel.context = object()  # in place of the ranks that share sequences
    message = error_of(parallel, (batch, batch, batch))
    assert "cp_group cannot be exported: attend to whole sequences" in message


def test_scales_of_blocks_are_refused():
    module = te.Linear(32, 16, device="cpu", name="fresh")
    message = error_of(module, (torch.randn(4, 32),), Float8BlockScaling())
    assert "Float8BlockScaling cannot be exported" in message and "(layer fresh)" in message


def test_layers_without_scales():
    module = te.Linear(32, 16, device="cpu", name="fresh")
    message = error_of(module, (torch.randn(4, 32),), RECIPES["delayed"])
    assert "expected scales that training or calibration has left" in message
    assert "(layer fresh)" in message
    assert not module.scaling


def test_without_the_context():
    module = te.LayerNormLinear(32, 16, device="cpu").eval()
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="onnx_export\\(enabled=True\\)"):
        torch.onnx.export(module, (torch.randn(4, 32),), verbose=False)
