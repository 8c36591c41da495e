"""Arguments of `te.checkpoint` in compiled code, and errors for what graphs do not support."""

from functools import partial
from typing import Any

import pytest
import torch
from checkpoint_helpers import HIDDEN, Wrap, build, states
from compiled_graphs import compiled, saved_and_run
from precisions import scope
from rulers import assert_equal
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import transformer_engine.pytorch as te
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast

# Torch 2.12 and older do not compile a checkpoint that changes Python's state.
REFUSAL = (
    "HOP: Unsafe side effect"
    if torch.__version__ < (2, 13)
    else "transformer_engine.pytorch.checkpoint in the compiled"
)


def fails(call: Wrap, *args: Any) -> str:
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        compiled()(call)(*args)
    return str(caught.value)


def test_what_a_graph_cannot_do() -> None:
    layer = build("cpu")["mlp"]
    x = torch.ones(16, HIDDEN, requires_grad=True)
    tracker = te.CudaRNGStatesTracker("cpu")
    message = fails(lambda x: te.checkpoint(layer, x, distribute_saved_activations=True), x)
    assert "distribute_saved_activations=False under torch.compile" in message
    message = fails(lambda x: te.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker), x)
    assert "get_rng_state_tracker=None under torch.compile" in message
    torch._dynamo.reset()
    without_effect = {"distribute_saved_activations": True, "use_reentrant": False}
    call = compiled()(lambda x: te.checkpoint(layer, x, tp_group=None, **without_effect))
    assert torch.equal(call(x), layer(x))
    call = compiled()(lambda x: te.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker))
    with torch.no_grad():  # nothing is saved or recomputed
        assert torch.equal(call(x), layer(x))


def test_positional_arguments_of_older_versions() -> None:
    layer = build("cpu")["mlp"]
    tracker = te.CudaRNGStatesTracker("cpu")
    x = torch.ones(16, HIDDEN, requires_grad=True)
    torch._dynamo.reset()
    with pytest.warns(DeprecationWarning, match="by keyword"):
        message = fails(lambda x: te.checkpoint(layer, True, lambda: tracker, None, x), x)
    assert "distribute_saved_activations" in message


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_torchs_own_checkpoint_is_right_or_refused(recipe: str) -> None:
    """It recomputes with the current scales; if an update has changed them, that is an error."""
    found = []
    for inside in (False, True):
        reset_autocast()
        torch._dynamo.reset()
        modules = build("cpu")

        def eager(x: torch.Tensor, m: Any = modules) -> torch.Tensor:
            y: torch.Tensor = m["mlp"](m["linear"](x))
            return y

        def forward(x: torch.Tensor, m: Any = modules) -> torch.Tensor:
            y: torch.Tensor = torch_checkpoint(m["mlp"], m["linear"](x), use_reentrant=False)
            return y

        x = torch.ones(16, HIDDEN).cumsum(1).requires_grad_()
        with scope(recipe):  # makes the scaling state; in a checkpoint Dynamo refuses to do so
            compiled()(eager)(2 * x.detach())
        call = compiled()(forward) if inside else eager
        try:
            with scope(recipe):
                y = call(x)
            y.sum().backward()
        except RuntimeError as error:
            assert recipe == "delayed" and inside
            assert REFUSAL in str(error)
        else:
            found.append([x.grad, *states(modules)])
    for other in found[1:]:
        assert_equal(other, found[0])


def keep_gemms(context: object, operator: object, *args: object, **kwargs: object) -> bool:
    return "gemm" in str(operator)


def test_a_policy_of_ones_own() -> None:
    """`context_fn` has the same meaning as for torch's checkpoint."""
    layer = build("cpu")["mlp"]
    x = torch.randn(64, HIDDEN, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, keep_gemms)
    more = {"use_reentrant": False, "context_fn": contexts}
    _, run = saved_and_run(lambda x: te.checkpoint(layer, x, **more), x, "current")
    assert run["backward norm_forward"] and not run["backward fp8_gemm"]


def test_exported_programs_hold_the_function_alone() -> None:
    layer = build("cpu")["mlp"]
    layer.checkpoint = True
    x = torch.ones(16, HIDDEN)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))
