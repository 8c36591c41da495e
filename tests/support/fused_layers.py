"""Which nodes of autograd's graph a layer has become, and layers to ask that of."""

import torch
from precisions import scope

import transformer_engine.pytorch as te


def build(device="cpu", kind=te.TransformerLayer, **more):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    options |= {"params_dtype": torch.bfloat16, "name": "layer", "device": device}
    return kind(64, 128, 4, **{**options, **more})


def batch(device="cpu", seed=1, length=16):
    x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16).requires_grad_()


def nodes(y):
    """How many chains autograd has recorded for a result."""
    seen, front, count = set(), [y.grad_fn], 0
    while front:
        node = front.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += type(node).__name__ == "_ChainNodeBackward"
        front += [n for n, _ in node.next_functions]
    return count


def is_fused(y):
    return nodes(y) == 1


def results(layer, recipe, device, steps=3, **call):
    """Everything that a few steps and an evaluation leave behind, GEMM counts, the last result."""
    found = []
    te.gemm_report(reset=True)
    torch.manual_seed(3)
    for step in range(steps):
        x = batch(device, step)
        with scope(recipe):
            y = layer(x, **call)
        y.backward(torch.randn(y.shape).to(y))
        found += [y, x.grad, *(p.grad for p in layer.parameters())]
        for p in layer.parameters():
            p.grad = None
    found.append(torch.rand(2, device=device))
    layer.eval()
    with torch.no_grad(), scope(recipe):
        found.append(layer(x, **call))
    layer.train()
    for module in layer.modules():
        found += [s.amax_history for s in getattr(module, "scaling", {}).values()]
    return found, te.gemm_report(reset=True), y
