"""Stand-ins for flash-attn 2 and 3 with their private backward functions and log-sum-exps.

To the stand-ins of `fake_flash_attn.py` this file adds the private functions that write gradients,
with the signatures of flash-attn 2.8 and of flash-attn 3 since its operators are registered with
torch.
"""

import inspect
from itertools import pairwise
from types import SimpleNamespace

import torch
from cases.fake_flash_attn import _gradients, _scores
from cases.fake_flash_attn import module as public_module

READ = "dout q k v out softmax_lse"
WRITTEN = "dq dk dv"
SEQUENCES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SETTINGS = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
# Parameters of each function: those without a default, and those with one.
PARAMETERS = {
    "flash2": (f"{READ} {WRITTEN} {SETTINGS} deterministic", "rng_state"),
    "flash2 varlen": (
        f"{READ} {WRITTEN} {SEQUENCES} {SETTINGS} deterministic",
        "rng_state zero_tensors",
    ),
    "flash3": (
        READ,
        f"{SEQUENCES} sequed_q sequed_k {WRITTEN} softmax_scale is_causal window_size_left"
        " window_size_right softcap deterministic sm_margin",
    ),
}


def _signature(names):
    required, optional = (kind.split() for kind in names)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            *(inspect.Parameter(name, kind) for name in required),
            *(inspect.Parameter(name, kind, default=None) for name in optional),
        ]
    )


def _backward(arguments):
    """Writes the gradients; rows that belong to no sequence become NaN."""
    assert arguments["softcap"] == 0.0 and not arguments.get("dropout_p")
    read, written = ([arguments[name] for name in names.split()] for names in (READ, WRITTEN))
    dout, q, k, v, out, lse = read
    said = {
        "scale": arguments["softmax_scale"],
        "causal": arguments.get("causal", arguments.get("is_causal")),
        "window": (arguments["window_size_left"], arguments["window_size_right"]),
        "slopes": arguments.get("alibi_slopes"),
    }
    assert lse.dtype is torch.float32
    if arguments.get("cu_seqlens_q") is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        for i, rows in enumerate(zip(q, k, v, out, dout, lse, strict=True)):
            for memory, gradient in zip(written, _gradients(*rows, **said), strict=True):
                memory[i] = gradient
        return
    assert lse.shape == (q.shape[1], q.shape[0])
    for memory in written:
        memory.fill_(float("nan"))
    sides = [pairwise(arguments[f"cu_seqlens_{side}"].tolist()) for side in "qk"]
    for (a, b), (c, d) in zip(*sides, strict=True):
        rows = (q[a:b], k[c:d], v[c:d], out[a:b], dout[a:b], lse[:, a:b])
        for memory, gradient, part in zip(
            written, _gradients(*rows, **said), (slice(a, b), slice(c, d), slice(c, d)), strict=True
        ):
            memory[part] = gradient


def module(version):
    """Returns the functions of flash-attn 2 or 3; `calls` lists the calls of private functions."""
    public, calls = public_module(version), []

    def private(name):
        def backward(**arguments):
            backward.__signature__.bind(**arguments)
            calls.append(name)
            _backward(arguments)

        backward.__signature__ = _signature(PARAMETERS[name])
        return backward

    def beside_statistics(function, statistics):
        def run(q, k, v, *, return_attn_probs=False, **keywords):
            out = function(q, k, v, **keywords)
            if not return_attn_probs:
                return out
            out = out[0] if isinstance(out, tuple) else out
            said = {
                "scale": keywords["softmax_scale"],
                "causal": keywords["causal"],
                "window": keywords["window_size"],
                "slopes": keywords.get("alibi_slopes"),
            }
            lse = statistics(q, k, keywords, said)
            return (out, lse, None) if version == "flash2" else (out, lse)

        return run

    def of_whole(q, k, keywords, said):
        return torch.stack(
            [_scores(*pair, **said)[0].logsumexp(-1) for pair in zip(q, k, strict=True)]
        )

    def of_packed(q, k, keywords, said):
        lse = q.new_full((q.shape[1], q.shape[0]), float("nan"), dtype=torch.float32)
        sides = [pairwise(keywords[f"cu_seqlens_{side}"].tolist()) for side in "qk"]
        for (a, b), (c, d) in zip(*sides, strict=True):
            lse[:, a:b] = _scores(q[a:b], k[c:d], **said)[0].logsumexp(-1)
        return lse

    known = {
        "flash2": {
            "flash_attn_interface": SimpleNamespace(
                _flash_attn_backward=private("flash2"),
                _flash_attn_varlen_backward=private("flash2 varlen"),
            )
        },
        "flash3": {"_flash_attn_backward": private("flash3")},
    }
    return SimpleNamespace(
        flash_attn_func=beside_statistics(public.flash_attn_func, of_whole),
        flash_attn_varlen_func=beside_statistics(public.flash_attn_varlen_func, of_packed),
        calls=calls,
        **known[version],
    )
