"""Kinds of layers that may run as one chain, and a count of chains in autograd's graph."""

from contextlib import contextmanager

import torch
from precisions import scope

import transformer_engine.pytorch as te


def tracker():
    states = te.CudaRNGStatesTracker("cuda" if torch.cuda.is_available() else "cpu")
    states.add("model-parallel-rng", 1)
    return states


KINDS = {
    "encoder": {},
    "sbhd, fused weights": {"attn_input_format": "sbhd", "fuse_qkv_params": True},
    "groups": {"num_gqa_groups": 2, "qkv_weight_interleaved": False, "fuse_qkv_params": True},
    "interleaved groups": {"num_gqa_groups": 2, "kv_channels": 24},
    "RMSNorm, swiglu": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "window": {"window_size": (5, 0), "layer_number": 3},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "dropout of a tracker": {"attention_dropout": 0.3, "get_rng_state_tracker": tracker},
    "no mask": {"self_attn_mask_type": "no_mask", "zero_centered_gamma": True},
    "decoder": {"layer_type": "decoder"},
    "decoder with groups": {"layer_type": "decoder", "num_gqa_groups": 2, "hidden_dropout": 0.1},
    "parallel": {"parallel_attention_mlp": True, "hidden_dropout": 0.1},
    "norm at the end": {"output_layernorm": True},
    "dropped paths": {"drop_path_rate": 0.5, "hidden_dropout": 0.1},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
    "L2 norms of heads": {"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True},
    "sink": {"softmax_type": "learnable"},
    "attention alone": {"kind": te.MultiheadAttention},
    "attention without a norm": {"kind": te.MultiheadAttention, "input_layernorm": False},
}


def build(device="cpu", kind=te.TransformerLayer, **more):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    options |= {"params_dtype": torch.bfloat16, "name": "layer", "device": device}
    return kind(64, 128, 4, **{**options, **more})


def make_of(kind, device, **more):
    """Makes a layer of one of `KINDS`, with further arguments."""
    options = {**KINDS[kind], **more}
    if options.get("kind") is not te.MultiheadAttention:
        return build(device, **options)
    torch.manual_seed(0)
    del options["kind"]
    options = {"input_layernorm": True, "qkv_format": "bshd", "attention_dropout": 0.0, **options}
    return te.MultiheadAttention(
        64, 4, params_dtype=torch.bfloat16, device=device, name="layer", **options
    )


def moved(call, device):
    """Returns arguments of a call, with tensors moved to this device."""

    def move(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return {name: move(value) for name, value in call.items()}


def batch(device="cpu", seed=1, length=16):
    x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16).requires_grad_()


def nodes(y):
    """Counts the chain nodes that autograd has recorded for a result."""
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


@contextmanager
def observed(*modules):
    """Hooks on modules: their results are rounded before the residual is added."""
    handles = [module.register_forward_hook(lambda *_: None) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def results(layer, recipe, device, steps=3, make_batch=batch, **call):
    """Trains some steps and evaluates once; returns all tensors, GEMM counts and the last result.

    The tensors are results, gradients, amax histories and a random draw that shows the RNG state.
    """
    found = []
    te.gemm_report(reset=True)
    torch.manual_seed(3)
    for step in range(steps):
        x = make_batch(device, step)
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
