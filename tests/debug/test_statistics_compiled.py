"""Built-in statistics of compiled layers: they equal those of eager mode, as do results."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from debug_session import SIX, Config, debugging, logged, section
from precisions import scope
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te

MOMENTS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
MOMENTS += [{"max_blockwise_dynamic_range": {"block_size": 8}}]
CASTS = ["underflows%", "overflows%", "mse", "scale_inv_max", "fp8_current_scaling_underflows%"]
COLUMNS = ["mse_columnwise", "fp8_block_scaling_mse_columnwise"]
MODULES = {"Linear": te.Linear, "LayerNormLinear": te.LayerNormLinear, "MLP": te.LayerNormMLP}
Wrap = Callable[..., Any]  # torch.compile, or the identity


def build(kind: str, device: str, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"device": device, "params_dtype": torch.bfloat16, "name": "layer", **more}
    return MODULES[kind](32, 64, **options)


def batch(module: torch.nn.Module, seed: int, tokens: int = 16) -> torch.Tensor:
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))
    return x.to(next(module.parameters()).device, torch.bfloat16).requires_grad_()


class Case(NamedTuple):
    """A run of a few steps; `mode` names its special conditions."""

    kind: str
    recipe: str
    mode: str = "training"

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def sections(self) -> list[Config]:
        """Asks for every statistic; for moments in every second iteration only."""
        found = [section("LogTensorStats", tensors=SIX, stats=MOMENTS, freq=2)]
        if self.recipe != "high precision":
            stats = CASTS if self.mode == "inference" else CASTS + COLUMNS
            found.append(section("LogFp8TensorStats", tensors=SIX[:3], stats=stats))
        return found

    def run(self, device: str, wrap: Wrap, step: Callable[[], None]) -> list[torch.Tensor]:
        """Returns outputs and gradients of three steps."""
        with te.quantized_model_init(enabled=self.mode == "fp8 weights"):
            module = build(self.kind, device)
        if self.mode == "own checkpoint":
            module.checkpoint = True
        call = self._call(module, wrap)
        seen = []
        for index in range(3):
            for part in range(2 if self.mode == "micro-batches" else 1):
                first = {"is_first_microbatch": part == 0} if self.mode == "micro-batches" else {}
                tokens = {"dynamic": 16 + 8 * index, "padded": 21}.get(self.mode, 16)
                x = batch(module, 10 * index + part, tokens)
                y = call(x, **first)
                seen.append(y.detach())
                if y.requires_grad:
                    y.float().square().mean().backward()
                    seen.append(x.grad)
            seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
            module.zero_grad()
            step()
        return seen

    def _call(self, module: torch.nn.Module, wrap: Wrap) -> Callable[..., torch.Tensor]:
        def inside(x: torch.Tensor) -> torch.Tensor:
            with scope(self.recipe):
                return module(x)

        if self.mode == "inside":
            return wrap(inside)
        function: Any = module
        if self.mode == "checkpoint":
            function = lambda x: checkpoint(module, x, use_reentrant=False)  # noqa: E731
        if self.mode == "te.checkpoint":
            function = lambda x: te.checkpoint(module, x)  # noqa: E731
        compiled = wrap(function, **({"dynamic": True} if self.mode == "dynamic" else {}))

        def outside(x: torch.Tensor, **more: Any) -> torch.Tensor:
            with scope(self.recipe), torch.set_grad_enabled(self.mode != "inference"):
                return compiled(x, **more)

        if self.mode == "around":  # a checkpoint around compiled code
            return lambda x: checkpoint(outside, x, use_reentrant=False)
        return outside


CASES = (
    Case("Linear", "high precision"),
    Case("LayerNormLinear", "delayed"),
    Case("MLP", "current"),
    Case("Linear", "blocks"),
    Case("LayerNormLinear", "delayed", "inference"),
    Case("MLP", "high precision", "inference"),
    Case("Linear", "delayed", "inside"),
    Case("MLP", "current", "padded"),
    Case("Linear", "high precision", "dynamic"),
    Case("Linear", "delayed", "micro-batches"),
    Case("LayerNormLinear", "current", "fp8 weights"),
    Case("MLP", "high precision", "checkpoint"),
    Case("LayerNormLinear", "current", "checkpoint"),
    Case("LayerNormLinear", "current", "around"),
    Case("LayerNormLinear", "delayed", "te.checkpoint"),
    Case("MLP", "delayed", "own checkpoint"),
    Case("MLP", "blocks", "own checkpoint"),
)


def assert_close(compiled: dict[Any, Any], eager: dict[Any, Any]) -> None:
    """Asserts equality up to the order of sums.

    On a GPU, eager kernels compute moments inside other kernels, which add in another order.
    """
    assert set(compiled) == set(eager)
    for key, expected in eager.items():
        spread = expected.get("std", 0.0)
        assert set(compiled[key]) == set(expected)
        for name, value in expected.items():
            least = 1e-6 * spread if name == "mean" else 1e-12  # a mean may be near zero
            close = pytest.approx(value, rel=1e-6, abs=least, nan_ok=True)
            assert compiled[key][name] == close, (key, name)


def compare(case: Case, folder: Path, device: str, backend: str) -> None:
    plain = case.run(device, lambda function, **_: function, lambda: None)
    logs = []
    for name in ("eager", "compiled"):
        torch._dynamo.reset()

        def wrap(function: Any, compiled: bool = name == "compiled", **more: Any) -> Any:
            if not compiled:
                return function
            return torch.compile(function, backend=backend, fullgraph=True, **more)

        with debugging(folder / name, *case.sections):
            seen = case.run(device, wrap, debug_api.step)
        if backend == "aot_eager":  # inductor rounds fused operations at other places
            assert all(map(torch.equal, seen, plain))
        logs.append(logged(folder / name))
    eager, compiled = logs
    if device == "cpu":
        assert repr(compiled) == repr(eager)  # including NaN
    assert_close(compiled, eager)
    assert {iteration for iteration, _, _ in eager} >= {0, 2}


@pytest.mark.sampled_on_cpu
@pytest.mark.filterwarnings("ignore:.*Skipping stats collection")  # on FP8 weights
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_eager_mode(case: Case, tmp_path: Path, device: str) -> None:
    compare(case, tmp_path, device, "aot_eager")


def test_inductor_keeps_the_operators(tmp_path: Path, device: str) -> None:
    compare(Case("Linear", "high precision"), tmp_path, device, "inductor")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch makes it for its memory pool
@pytest.mark.parametrize("recipe", ["high precision", "current"])
def test_cuda_graphs_of_a_compiler(tmp_path: Path, recipe: str) -> None:
    """Graphs are replayed without Python, so the device decides which statistics are due."""
    case, logs = Case("LayerNormLinear", recipe), []
    for name in ("eager", "compiled"):
        torch._dynamo.reset()
        module = call = build("LayerNormLinear", "cuda")
        if name == "compiled":
            call = torch.compile(module, mode="reduce-overhead", fullgraph=True)
        with debugging(tmp_path / name, *case.sections):
            for index in range(9):
                for part in range(2):
                    torch.compiler.cudagraph_mark_step_begin()
                    with scope(recipe):
                        y = call(batch(module, 10 * index + part))
                    y.float().square().mean().backward()
                    module.zero_grad()  # the gradient is in the graph's memory
                debug_api.step()
        logs.append(logged(tmp_path / name))
    assert_close(*logs)


ONE = section("LogTensorStats", tensors=["activation", "gradient"], stats=["max"])


def test_sessions_come_and_go(tmp_path: Path) -> None:
    """Each session compiles once, even for layers that were compiled before; steps do not."""
    torch._dynamo.reset()
    module = build("LayerNormLinear", "cpu")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    x = batch(module, 0)
    compiled(x)
    for session, graphs in (("first", 2), ("second", 3)):
        with debugging(tmp_path / session, ONE):
            for _ in range(3):
                compiled(x).sum().backward()
                debug_api.step()
        assert counter.frame_count == graphs
        assert sorted(logged(tmp_path / session)) == [
            (i, "layer", tensor) for i in range(3) for tensor in ("activation", "gradient")
        ]
        compiled(x)
        assert counter.frame_count == graphs  # without a session, the first graph is used again


@pytest.mark.filterwarnings("ignore:.*selects no layer")
def test_a_backward_after_its_session_is_of_no_session(tmp_path: Path) -> None:
    torch._dynamo.reset()
    module = build("Linear", "cpu")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with debugging(tmp_path / "first", ONE):
        y, z = compiled(batch(module, 0)), compiled(batch(module, 0))
        debug_api.step()
    y.sum().backward()
    with debugging(tmp_path / "second", ONE):
        z.sum().backward()
        debug_api.step()
    assert list(logged(tmp_path / "first")) == [(0, "layer", "activation")]
    assert not (tmp_path / "second" / "statistics_rank-0.jsonl").read_text()


def test_sessions_without_features_compile_nothing_anew(tmp_path: Path) -> None:
    """Layers of one shape still share a graph, because their names are no guard of the graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = [build("Linear", "cpu", name=f"layer{i}") for i in range(10)]
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
    for session in range(3):
        with debugging(tmp_path / str(session)):
            for layer in layers:
                layer(batch(layer, 0))
                debug_api.step()
    assert counter.frame_count == 1


def test_a_renamed_layer_is_another_layer(tmp_path: Path) -> None:
    torch._dynamo.reset()
    module = build("Linear", "cpu")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with debugging(tmp_path, ONE):
        compiled(batch(module, 0))
        module.name = "other"
        compiled(batch(module, 0))
        debug_api.step()
    assert {layer for _, layer, _ in logged(tmp_path)} == {"layer", "other"}


def test_inference_mode(tmp_path: Path, device: str) -> None:
    """Tensors that are made in inference mode are written to outside of it."""
    torch._dynamo.reset()
    module = build("LayerNormLinear", device)
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        with debugging(tmp_path, ONE):
            for _ in range(2):
                with torch.inference_mode():
                    call(batch(module, 0))
                debug_api.step()
        assert len(logged(tmp_path)) == 2


@pytest.mark.parametrize(
    ("feature", "body"),
    [
        ("FakeQuant", {"tensors": ["activation"], "gemms": ["fprop"], "quant_format": "FP8E4M3"}),
        ("DisableFP8Layer", {}),
        ("DumpTensors", {"tensors": ["activation"], "high_precision_tensor": True}),
    ],
)
def test_other_features_are_refused(tmp_path: Path, feature: str, body: dict[str, Any]) -> None:
    """They are refused even if statistics are selected, too."""
    torch._dynamo.reset()
    module = build("Linear", "cpu")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    message = rf"in a compiled graph, got feature {feature} on layer layer"
    with (
        debugging(tmp_path, ONE, section(feature, **body)),
        pytest.raises(Exception, match=message),
    ):
        compiled(batch(module, 0))


def test_an_exported_layer_is_refused(tmp_path: Path) -> None:
    """The exported program would run without the session."""
    module = build("Linear", "cpu")
    message = "in a compiled graph, got feature LogTensorStats on layer layer"
    with debugging(tmp_path, ONE), pytest.raises(Exception, match=message):
        torch.export.export(module, (batch(module, 0),))


def test_messages_come_once(tmp_path: Path) -> None:
    """Compiled layers emit the messages about statistics that eager layers emit."""
    torch._dynamo.reset()
    module = build("Linear", "cpu")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    config = section("LogFp8TensorStats", tensors=["activation"], stats=["mse"], start_step=1)
    with debugging(tmp_path, config), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(batch(module, 0))
            debug_api.step()
    text = [str(w.message) for w in caught if "Skipping stats collection" in str(w.message)]
    assert len(text) == 1 and "layer layer, tensor activation" in text[0]
    (log,) = (tmp_path / "nvdlfw_inspect_logs").iterdir()
    lines = log.read_text()
    assert lines.count("Feature=LogFp8TensorStats, API=inspect_tensor: activation") == 1
    assert lines.count("Tensor: activation, gemm fprop - High precision") == 1


@pytest.mark.parametrize("order", ["training first", "evaluation first", "evaluation alone"])
def test_an_evaluation_counts_as_in_eager_mode(tmp_path: Path, order: str) -> None:
    def training(layer: torch.nn.Module, call: Wrap) -> None:
        call(batch(layer, 0)).square().sum().backward()

    def evaluation(layer: torch.nn.Module, call: Wrap) -> None:
        layer.eval()
        with torch.no_grad():
            call(10 * batch(layer, 1))
        layer.train()

    runs = [evaluation] if "alone" in order else [training, evaluation]
    statistics = section("LogTensorStats", tensors=SIX, stats=["max", "l1_norm"])
    logs = []
    for how in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
        folder = tmp_path / str(len(logs))
        with debugging(folder, statistics):
            layer = build("Linear", "cpu")
            call = how(layer)
            for _ in range(2):
                for part in reversed(runs) if order == "evaluation first" else runs:
                    part(layer, call)
                debug_api.step()
        logs.append(logged(folder))
    assert logs[0] == logs[1]
    assert len(logs[0]) == 2 * (3 if "alone" in order else 6)


def test_a_layer_that_is_made_again_after_eager_and_compiled_calls(tmp_path: Path) -> None:
    call = torch.compile(lambda module, x: module(x), backend="eager")
    with debugging(tmp_path, section("LogTensorStats", tensors=["activation"], stats=["max"])):
        for _ in range(2):
            module = build("Linear", "cpu", params_dtype=torch.float32)
            for step in (call, torch.nn.Module.__call__):
                step(module, torch.ones(16, 32)).sum().backward()
                debug_api.step()
            del module
            torch._dynamo.reset()
            gc.collect()
            other = build("Linear", "cpu", params_dtype=torch.float32, name="other")
            other(torch.ones(16, 32))
            debug_api.step()  # the deleted layer is forgotten
    found = logged(tmp_path)
    steps = [i for (i, layer, _), values in found.items() if layer == "layer" and values["max"]]
    assert steps == [0, 1, 3, 4]
