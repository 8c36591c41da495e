"""Debugger sessions with compiled code and CUDA graphs.

Layers that no feature selects run as without a session. Features that need Python in a forward
raise an error, because a graph cannot call it.
"""

import pytest
import torch
from fake_manager import session
from hook_cases import HighPrecision, Modifier, build
from precisions import scope

from transformer_engine.debug import inspector


def compiled(module):
    traced = torch.compile(module, backend="aot_eager", fullgraph=True)

    def step(x):
        with scope("current"):
            return traced(x)

    return step


def test_nothing_selected_traces_once() -> None:
    torch._dynamo.reset()
    module = build("norm linear", "cpu")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    step = compiled(module)
    expected = step(x)
    with session(("elsewhere", Modifier(), {})) as s:
        step(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(3):
                s.step()
                assert torch.equal(step(x), expected)


@pytest.mark.parametrize("feature", [Modifier(), HighPrecision()], ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("before", [False, True], ids=["compiled", "compiled before"])
def test_a_feature_on_a_compiled_layer_is_refused(feature, before: bool) -> None:
    torch._dynamo.reset()
    step = compiled(build("mlp", "cpu"))
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    if before:
        step(x)
    name = type(feature).__name__
    with (
        session(("fc2", feature, {"gemms": ["fprop"]})),
        pytest.raises(
            Exception,
            match=rf"in a compiled graph, got feature {name} on layer layer\.fc2",
        ),
    ):
        step(x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_feature_on_a_captured_layer_is_refused() -> None:
    module = build("linear", "cuda")
    x = torch.randn(16, 32, dtype=torch.bfloat16, device="cuda")
    with session(("layer", Modifier(), {})), torch.no_grad():
        module(x)
        with (
            pytest.raises(RuntimeError, match="capture, got feature Modifier on layer layer"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            module(x)


class Later(Modifier):
    """A feature that is not due before a certain iteration."""

    def modify_tensor_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return iteration >= 10, max(10, iteration + 1)


def test_a_feature_that_is_not_due_is_refused_in_a_capture(device, monkeypatch) -> None:
    """The feature may be due later, when the graph is replayed."""
    module = build("linear", device)
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=device)
    with session(("layer", Later(), {})), torch.no_grad():
        module(x)
        monkeypatch.setattr(inspector, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="capture, got feature Later on layer layer"):
            module(x)


@pytest.mark.gpu
def test_nothing_selected_captures() -> None:
    module = build("linear", "cuda")
    x = torch.randn(16, 32, dtype=torch.bfloat16, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with session(("elsewhere", Modifier(), {})) as s, torch.no_grad():
        with torch.cuda.stream(side):
            expected = module(x)
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            y = module(x)
        for _ in range(2):
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, expected)
            s.step()
