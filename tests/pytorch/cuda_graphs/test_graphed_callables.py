"""`make_graphed_callables`: forward and backward of modules as CUDA graphs."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from debug_session import debugging, logged, section
from graph_helpers import (
    BATCH,
    HIDDEN,
    RECIPES,
    STEPS,
    batch,
    everything,
    layer,
)
from precisions import scope
from rulers import assert_equal
from torch import nn

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def run_model(model, recipe: str, parts, cached: bool = False) -> list[torch.Tensor]:
    """Run steps of two micro-batches, with plain gradient descent."""
    generator = torch.Generator("cuda").manual_seed(5)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        for i in range(2):
            x = torch.randn(
                16, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator
            ).requires_grad_()
            y = x
            more = {"is_first_microbatch": i == 0} if cached else {}
            with scope(recipe):
                for part in parts:
                    y = part(y, **more)
            loss = y.float().square().mean()
            loss.backward()
            losses += [loss.detach(), x.grad]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad)
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cached", [False, True])
def test_graphed_modules(recipe: str, cached: bool) -> None:
    if cached and recipe == "high precision":
        pytest.skip("there is nothing to cache")
    eager = nn.ModuleList(layer(i) for i in range(2))
    graphed = copy.deepcopy(eager)
    samples = [(batch().requires_grad_(),) for _ in graphed]
    parts = te.make_graphed_callables(
        tuple(graphed),
        tuple(samples),
        fp8_enabled=RECIPES[recipe] is not None,
        fp8_recipe=RECIPES[recipe],
        fp8_weight_caching=cached,
    )
    assert parts == tuple(graphed)
    expected = run_model(eager, recipe, eager, cached)
    assert_equal(run_model(graphed, recipe, parts, cached), expected)
    assert_equal(everything(graphed), everything(eager))


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [False, True])
def test_accumulated_gradients(cached: bool) -> None:
    def build():
        torch.manual_seed(0)
        module = te.LayerNormMLP(
            HIDDEN, 128, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16
        )
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        return module

    found = []
    for graphed in (False, True):
        module = build()
        if graphed:
            te.make_graphed_callables(
                module, (batch().requires_grad_(),), enabled=True, cache_quantized_params=cached
            )
        torch.manual_seed(1)
        for _ in range(2):
            for i in range(2):
                more = {"is_first_microbatch": i == 0} if cached else {}
                with te.fp8_autocast():
                    module(batch().requires_grad_(), **more).float().sum().backward()
        found.append([p.main_grad for p in (module.fc1_weight, module.fc2_weight)])
    assert_equal(found[1], found[0])


@pytest.mark.gpu
def test_without_an_autocast_around_calls() -> None:
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        module, x = te.Linear(HIDDEN, HIDDEN), torch.randn(16, HIDDEN, device="cuda")
        x.requires_grad_()
        if graphed:
            sample = torch.randn(16, HIDDEN, device="cuda", requires_grad=True)
            module = te.make_graphed_callables(module, (sample,), fp8_enabled=True)
        for _ in range(3):
            with nullcontext() if graphed else te.fp8_autocast():
                y = module(x)
            y.sum().backward()
        found.append([y.detach(), x.grad, *everything(module)])
    assert_equal(found[1], found[0])


@pytest.mark.gpu
def test_pipeline_order() -> None:
    """The model has two chunks, and two micro-batches run before the first backward."""
    torch.manual_seed(0)
    eager = nn.ModuleList(te.Linear(HIDDEN, HIDDEN) for _ in range(2))
    graphed = copy.deepcopy(eager)

    def sample():
        return (torch.randn(16, HIDDEN, device="cuda", requires_grad=True),)

    order = [1, 2, 1, 2, -2, -1, -2, -1]
    parts = te.make_graphed_callables(
        tuple(graphed), tuple(sample() for _ in range(4)), fp8_enabled=True, _order=order
    )
    xs = [sample()[0] for _ in range(2)]
    found = []
    for model, first, second in (
        (eager, (eager[0],) * 2, (eager[1],) * 2),
        (graphed, parts[:2], parts[2:]),
    ):
        for _ in range(3):
            with te.fp8_autocast():
                outs = [second[i](first[i](xs[i])).sum() for i in range(2)]
            for out in outs:
                out.backward()
        found.append([*(x.grad for x in xs), *(t.clone() for t in everything(model))])
        found[-1] += [p.grad for p in model.parameters()]
        for x in xs:
            x.grad = None
    assert_equal(found[1], found[0])


@pytest.mark.gpu
def test_functions_keywords_and_structures() -> None:
    weight = torch.randn(8, device="cuda")

    def function(x, *, by, scale):
        return {"y": x * by["a"] * weight * scale, "n": 3}

    x, a = (torch.randn(4, 8, device="cuda", requires_grad=True) for _ in range(2))
    graphed = te.make_graphed_callables(
        function,
        (torch.ones_like(x).requires_grad_(),),
        sample_kwargs={"by": {"a": torch.ones_like(a).requires_grad_()}, "scale": 2.0},
    )
    out = graphed(x, by={"a": a}, scale=2.0)
    out["y"].sum().backward()
    assert out["n"] == 3
    assert torch.equal(out["y"], x * a * weight * 2.0)
    assert torch.equal(x.grad, a * weight * 2.0) and torch.equal(a.grad, x * weight * 2.0)
    with pytest.raises(ValueError, match=r"argument 2 of callable 0 \(function\) as it was"):
        graphed(x, by={"a": a}, scale=3.0)
    with pytest.raises(TypeError, match="expected arguments as callable 0"):
        graphed(x)


@pytest.mark.gpu
def test_random_numbers_of_a_tracker_are_new_in_every_replay() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 11)
    model = layer(dropout=0.5, get_rng_state_tracker=lambda: tracker)
    te.make_graphed_callables(model, (batch().requires_grad_(),))
    x = batch().requires_grad_()
    assert not torch.equal(model(x).clone(), model(x))


@pytest.mark.gpu
def test_evaluation_runs_eagerly() -> None:
    module = te.Linear(HIDDEN, HIDDEN)
    sample = torch.randn(16, HIDDEN, device="cuda", requires_grad=True)
    te.make_graphed_callables(module, (sample,), fp8_enabled=True)
    before = everything(copy.deepcopy(module))
    with torch.no_grad(), te.fp8_autocast():
        assert module(torch.randn(5, HIDDEN, device="cuda")).shape == (5, HIDDEN)
        module.eval()
        assert module(torch.randn(5, HIDDEN, device="cuda")).shape == (5, HIDDEN)
    assert_equal(everything(module), before)


@pytest.mark.gpu
def test_statistics_of_graphed_modules(tmp_path: Path) -> None:
    config = section("LogTensorStats", tensors=["activation", "gradient"], stats=["mean", "max"])
    logs = []
    for graphed in (False, True):
        torch.manual_seed(0)
        module = te.Linear(HIDDEN, HIDDEN, name="linear")
        with debugging(tmp_path / str(graphed), config):
            if graphed:
                sample = torch.randn(16, HIDDEN, device="cuda", requires_grad=True)
                te.make_graphed_callables(module, (sample,), fp8_enabled=True)
            torch.manual_seed(1)
            for _ in range(3):
                x = torch.randn(16, HIDDEN, device="cuda", requires_grad=True)
                with te.fp8_autocast():
                    y = module(x)
                y.square().sum().backward()
                debug_api.step()
        logs.append(logged(tmp_path / str(graphed)))
    assert logs[0] == logs[1] and len(logs[0]) == 6


class Reads(nn.Module):
    """Reads a value on the host, which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device="cuda"))

    def forward(self, x):
        return x * self.weight if x.sum().item() > 0 else x


@pytest.mark.gpu
def test_what_cannot_be_captured() -> None:
    x = torch.ones(4, 8, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"forward of callable 0 \(Reads\) cannot be captured"):
        te.make_graphed_callables(Reads(), (x,))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.synchronize()
    assert torch.rand(3, device="cuda").shape == (3,)  # torch's generator is usable again
    module = te.Linear(16, 16)
    module.unused = nn.Parameter(torch.ones(3, device="cuda"))
    sample = torch.randn(16, 16, device="cuda", requires_grad=True)
    with pytest.raises(ValueError, match="got none for unused"):
        te.make_graphed_callables(module, (sample,))
    te.make_graphed_callables(module, (sample,), allow_unused_input=True, enabled=True)
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=7)):
        module.eval()(sample)
    with pytest.raises(RuntimeError, match=r"FP8 state of layer .* capture again"):
        module.train()(sample)
    with pytest.raises(ValueError, match="without hooks"):
        hooked = te.Linear(16, 16)
        hooked.register_forward_hook(lambda *_: None)
        te.make_graphed_callables(hooked, (sample,))


def test_on_the_cpu_callables_stay_as_they_are() -> None:
    modules = tuple(te.Linear(16, 16, device="cpu") for _ in range(2))
    forward = modules[0].forward
    with pytest.warns(UserWarning, match="CUDA graphs need samples on a CUDA device") as notices:
        found = te.make_graphed_callables(modules, ((torch.ones(16, 16),),) * 2, fp8_enabled=True)
    assert found == modules and modules[0].forward == forward and len(notices) == 1
    with pytest.warns(UserWarning):
        assert te.make_graphed_callables(modules[0], (torch.ones(16, 16),)) is modules[0]
    modules[0].reset()
    copy.deepcopy(modules[0])


@pytest.mark.gpu
def test_containers_and_reset() -> None:
    """Replays of a container with cached weights equal eager calls; `reset` frees the graphs."""
    eager = nn.ModuleList(layer(i) for i in range(2))
    wrapped = nn.ModuleList(nn.Sequential(one) for one in copy.deepcopy(eager))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    parts = te.make_graphed_callables(
        tuple(wrapped),
        tuple((batch().requires_grad_(),) for _ in wrapped),
        fp8_enabled=True,
        fp8_recipe=RECIPES["delayed"],
        fp8_weight_caching=True,
    )
    expected = run_model(eager, "delayed", eager, cached=True)
    assert_equal(run_model(wrapped, "delayed", parts, cached=True), expected)
    held = torch.cuda.memory_allocated()
    for part in parts:
        part.reset()
        assert "forward" not in vars(part)
    assert torch.cuda.memory_allocated() < held, before
    with torch.no_grad():
        wrapped[0](batch())


class Experts(te.GroupedLinear):
    """A `GroupedLinear` whose GEMMs have equally many rows; it is called like other layers."""

    def forward(self, x, is_first_microbatch=None):
        rows = x.numel() // x.shape[-1] // self.num_gemms
        return super().forward(x, [rows] * self.num_gemms, is_first_microbatch)


@pytest.mark.gpu
def test_grouped_linear_with_cached_weights() -> None:
    torch.manual_seed(0)
    eager = nn.ModuleList([Experts(2, HIDDEN, HIDDEN, params_dtype=torch.bfloat16)])
    graphed, x = copy.deepcopy(eager), batch().requires_grad_()
    how = {"fp8_recipe": RECIPES["delayed"], "fp8_weight_caching": True}
    parts = te.make_graphed_callables(tuple(graphed), ((x,),), fp8_enabled=True, **how)
    expected = run_model(eager, "delayed", eager, cached=True)
    assert_equal(run_model(graphed, "delayed", parts, cached=True), expected)
    assert_equal(everything(graphed), everything(eager))


@pytest.mark.gpu
def test_hooks_of_the_capture() -> None:
    calls = []
    hooks = {
        kind: {0: lambda module, *rest, kind=kind: calls.append((kind, len(rest)))}
        for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    }
    module, x = layer(0), batch().requires_grad_()
    graphed = te.make_graphed_callables(
        module, (x,), num_warmup_iters=1, capture_time_hooks=[hooks]
    )
    assert calls == [(kind, n) for kind, n in zip(hooks, (1, 2, 1, 2), strict=True)] * 2
    graphed(batch().requires_grad_()).sum().backward()
    assert len(calls) == 8


def test_arguments_that_contradict_each_other() -> None:
    module, x = te.Linear(16, 16, device="cpu"), torch.ones(16, 16)
    with pytest.raises(ValueError, match="one of fp8_enabled and enabled, got both"):
        te.make_graphed_callables(module, (x,), fp8_enabled=True, enabled=True)
    with pytest.raises(TypeError, match=r"sample_args=\(x,\), .* got a Tensor"):
        te.make_graphed_callables(module, x)
    with pytest.raises(TypeError, match="sample_args to be 2 tuple"):
        te.make_graphed_callables((module, module), ((x,),))
    with pytest.raises(TypeError, match="sample_kwargs to be 2 mapping"):
        te.make_graphed_callables((module, module), ((x,), (x,)), sample_kwargs={"a": x})
    with pytest.raises(ValueError, match="expected _order"):
        te.make_graphed_callables(module, ((x,),), _order=[-1, 1])
    with pytest.raises(ValueError, match="expected recipe"):
        te.make_graphed_callables(module, (x,), enabled=True, recipe="delayed")


@pytest.mark.gpu
def test_chunks_of_several_sizes_with_fp8_in_some() -> None:
    """Megatron-Core captures a pipeline in this way if its last layer stays in bf16."""
    torch.manual_seed(0)
    eager = nn.ModuleList(te.Linear(HIDDEN, HIDDEN) for _ in range(3))
    graphed = copy.deepcopy(eager)

    def sample():
        return (torch.randn(16, HIDDEN, device="cuda", requires_grad=True),)

    parts = te.make_graphed_callables(
        tuple(graphed),
        tuple(sample() for _ in range(3)),
        fp8_enabled=(True, True, False),
        _order=[1, 2, -2, -1],
        _num_layers_per_chunk=[1, 2],
        _reuse_graph_input_output_buffers=True,
    )
    x = sample()[0]
    found = []
    for model, run in ((eager, eager), (graphed, parts)):
        for _ in range(3):
            with te.fp8_autocast():
                inner = run[1](run[0](x))
            with te.fp8_autocast(enabled=False):
                out = run[2](inner)
            out.sum().backward()
        found.append([x.grad, *(t.clone() for t in everything(model))])
        found[-1] += [p.grad for p in model.parameters()]
        x.grad = None
    assert_equal(found[1], found[0])
