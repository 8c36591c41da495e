"""FP8 attention through cuDNN: kernels against stand-ins, the backend against the unfused one."""

import copy

import pytest
import torch
from cases import fake_cudnn_fp8
from cases.fp8_steps import CASES, RUNS, Case, assert_near, core_of, steps_of, tensors_of
from checkpoint_helpers import MODES
from fp8_reference import E4M3, E5M2, decode, encode
from recordings import all_recorded, segments_of
from rulers import assert_bitwise

import transformer_engine.pytorch as te
from transformer_engine import _C
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import cudnn_fp8, unfused
from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast
from transformer_engine.pytorch.kernels import attention_fp8 as kernels
from transformer_engine.pytorch.kernels.attention import APART, BSHD, SBHD, settings_of
from transformer_engine.pytorch.kernels.packed import packed_layout_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*FP8 attention runs on the backend"),
]
RECIPE = DelayedScaling(amax_history_len=2, fp8_dpa=True)


@pytest.fixture(autouse=True)
def _cudnn_alone(monkeypatch):
    reset_autocast()
    monkeypatch.setattr(core, "choose", lambda *call: cudnn_fp8.BACKEND)


def scales_of(*scales, device="cuda"):
    return [torch.tensor([scale], device=device) for scale in scales]


def amaxes(count=2):
    return [torch.zeros(1, device="cuda") for _ in range(count)]


def assert_values(codes, expected, format, bound, name):
    got, wanted = (decode(x.cpu().contiguous(), format).double() for x in (codes, expected))
    error = (got - wanted).norm() / wanted.norm()
    assert error < bound, f"{name}: relative error {error:.4f}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case):
    """Compares results, scales and amaxes with stand-ins, which round where cuDNN does."""
    of_grads = E5M2 if case.format is Format.HYBRID else E4M3
    window = (case.window[0] if case.window else -1, 0 if case.mask_type == "causal" else -1)
    settings = settings_of(SBHD if case.qkv_format == "sbhd" else BSHD, window)
    scale, scales = case.size**-0.5, (70.0, 300.0, 90.0)
    x = [encode(t.detach().cpu(), E4M3, 70.0) for t in tensors_of(case, "cpu")]
    on_gpu = [t.cuda() for t in x]
    found, wanted = amaxes(), [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    out, statistics, pairs = kernels.fp8_attention_forward(
        *on_gpu, scales_of(*scales), settings, scale, True, found
    )
    expected, _, expected_pairs = fake_cudnn_fp8.fp8_attention_forward(
        *x, scales, settings, scale, True, wanted
    )
    assert_bitwise(pairs[: kernels.FORWARD_SCALES].cpu(), expected_pairs)
    assert_values(out, expected, E4M3, 0.02, "out")
    for got, amax in zip(found, wanted, strict=True):
        assert got.item() == pytest.approx(amax.item(), rel=0.02)
    if not case.has_backward:
        return
    largest = 57344.0 if of_grads == E5M2 else 448.0
    scales = (largest / 6, largest / 8, largest / 16)
    grad = encode(torch.randn(expected.shape), of_grads, largest / 6)
    found, wanted = amaxes(4), [torch.zeros(1, dtype=torch.float64) for _ in range(4)]
    call_args = (pairs, scales_of(*scales), settings, scale, of_grads, found, APART)
    *actual, pair = kernels.fp8_attention_backward(
        grad.cuda(), *on_gpu, out, statistics, *call_args
    )
    call_args = (expected_pairs, scales, settings, scale, of_grads, wanted, APART)
    *grads, expected_pair = fake_cudnn_fp8.fp8_attention_backward(
        grad, *x, out.cpu(), statistics, *call_args
    )
    assert_bitwise(pair.cpu(), expected_pair)
    for name, got, by_definition in zip(("query", "key", "value"), actual, grads, strict=True):
        assert_values(got, by_definition, of_grads, 0.03, name)
    for got, amax in zip(found, wanted, strict=True):
        assert got.item() == pytest.approx(amax.item(), rel=0.1)


@pytest.mark.parametrize("last", [-3.6, 0.5, 3.6, 14.0])
def test_nothing_saturates_where_scores_grow(last):
    """Scores go from `-last` to `last` along the keys, so the running maximum grows."""
    scales, scale, n = (70.0, None, 800.0), 128**-0.5, 1024
    query, key, value = (0.5 * torch.randn(1, n, 2, 128) for _ in range(3))
    query[..., :4], key[..., :4] = (
        6.0,
        torch.linspace(-1, 1, n).view(1, n, 1, 1) * last / (24 * scale),
    )
    x = [encode(t, E4M3, 70.0) for t in (query, key, value)]
    settings = settings_of(BSHD)
    taken = [None if one is None else torch.tensor([one], device="cuda") for one in scales]
    out, _, _ = kernels.fp8_attention_forward(
        *(t.cuda() for t in x), taken, settings, scale, False, amaxes()
    )
    q, k, v = fake_cudnn_fp8.inputs(*x, settings, fake_cudnn_fp8.pairs_of(*scales))
    exact = fake_cudnn_fp8.weights(q, k, settings, scale) @ v
    found = decode(out.cpu(), E4M3).double().unflatten(-1, (-1, 128)).transpose(1, 2) / 800
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("case", "backward"), RUNS)
def test_steps_as_the_unfused_backend(case, backward, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    module = core_of(case)
    twin = copy.deepcopy(module)
    fused = steps_of(module, case, "cuda")
    monkeypatch.setattr(core, "choose", lambda *call: unfused.BACKEND)
    assert_near(fused, steps_of(twin, case, "cuda"))


@pytest.mark.parametrize("case", [case for case in CASES if case.packed], ids=str)
@pytest.mark.parametrize("backward", ["0", "1"])
def test_gradients_of_parts_of_one_tensor_are_parts_of_one(case, backward, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    module, x = core_of(case), tensors_of(case, "cuda")
    with te.fp8_autocast(fp8_recipe=RECIPE):
        out = module(*x)
    assert packed_layout_of(*torch.autograd.grad(out, x, torch.randn_like(out))) is not None


@pytest.mark.parametrize("size", [64, 128, 256])
def test_inference(size, monkeypatch):
    case = Case(size=size)
    module, x = core_of(case), tensors_of(case, "cuda")
    with monkeypatch.context() as patch:  # cuDNN's FP8 backend does not calibrate
        patch.setattr(core, "choose", lambda *call: unfused.BACKEND)
        with torch.no_grad(), te.fp8_autocast(False, calibrating=True, fp8_recipe=RECIPE):
            plain = module(*x)
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=RECIPE):
        fused = module(*x)
    assert (fused - plain).norm() < 0.08 * plain.norm()


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _stage_by_stage(monkeypatch):
    backend = cudnn_fp8.BACKEND._replace(recordable=lambda call: False)
    monkeypatch.setattr(core, "choose", lambda *call: backend)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("backward", ["0", "1"])
def test_recorded(backward, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    case = Case()
    module = core_of(case)
    twin = copy.deepcopy(module)
    recorded = steps_of(module, case, "cuda")
    assert all_recorded(module._core)
    _stage_by_stage(monkeypatch)
    for got, wanted in zip(recorded, steps_of(twin, case, "cuda"), strict=True):
        assert_bitwise(got, wanted)


def _layer_steps(layer):
    found = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.fp8_autocast(fp8_recipe=RECIPE):
            out = layer(x)
        out.backward(torch.randn_like(out))
        found += [out.detach(), x.grad]
    states = [s for m in layer.modules() for s in getattr(m, "scaling", {}).values()]
    return [*found, *[t.clone() for s in states for t in (s.scale, s.amax_history)]]


@pytest.mark.usefixtures("_deterministic")
def test_a_layer_is_recorded_as_a_whole(monkeypatch):
    options = {"fuse_qkv_params": True, "params_dtype": torch.bfloat16}
    layer = te.TransformerLayer(
        *(256, 512, 2),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        **options,
    )
    twin = copy.deepcopy(layer)
    recorded = _layer_steps(layer)
    assert all_recorded(layer) and all(one.recordable for one in segments_of(layer))
    _stage_by_stage(monkeypatch)
    for got, wanted in zip(recorded, _layer_steps(twin), strict=True):
        assert_bitwise(got, wanted)


def test_a_call_of_known_shapes_builds_no_graph():
    case = Case()
    module = core_of(case)
    steps_of(module, case, "cuda", 1)
    count = _C.attention_graph_count()
    steps_of(module, case, "cuda", 2)
    assert _C.attention_graph_count() == count


def test_repeats_bit_for_bit_where_asked():
    case, runs = Case(queries=512, keys=512, groups=2), []
    module = core_of(case)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            runs.append(steps_of(copy.deepcopy(module), case, "cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    for got, wanted in zip(*runs, strict=True):
        assert_bitwise(got, wanted)


@pytest.mark.parametrize("mode", ["te", "torch not reentrant"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_checkpoints_change_nothing(mask_type, mode):
    case = Case(mask_type)
    module = core_of(case)
    twin = copy.deepcopy(module)
    torch.use_deterministic_algorithms(True)
    try:
        plain = steps_of(module, case, "cuda")
        again = steps_of(twin, case, "cuda", wrap=MODES[mode])
    finally:
        torch.use_deterministic_algorithms(False)
    for got, wanted in zip(again, plain, strict=True):
        assert_bitwise(got, wanted)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_captured_in_a_graph():
    case = Case()
    eager = core_of(case)
    graphed = copy.deepcopy(eager)
    sample = tuple(tensors_of(case, "cuda"))
    te.make_graphed_callables(graphed, sample, fp8_enabled=True, fp8_recipe=RECIPE)
    assert_near(steps_of(graphed, case, "cuda"), steps_of(eager, case, "cuda"))


def test_compiled():
    case = Case()
    eager = core_of(case)
    compiled = copy.deepcopy(eager)
    compiled.compile(fullgraph=True, backend="aot_eager")
    results = [steps_of(module, case, "cuda") for module in (compiled, eager)]
    for got, wanted in zip(*(r[:4] for r in results), strict=True):
        assert (got.double() - wanted.double()).norm() < 0.1 * wanted.double().norm()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_that_would_be_built_inside_a_capture_is_an_error():
    case = Case(queries=88, keys=88)
    module, x = core_of(Case()), tensors_of(case, "cuda")
    steps_of(module, Case(), "cuda", 1)
    scope, graph = te.fp8_autocast(fp8_recipe=RECIPE), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warm-up"), scope, torch.cuda.graph(graph):
        module(*x)


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_preferred(size, mask_type):
    """The backend is chosen, and a training step with it runs."""
    question = {"fp8": True, "kv_channels": size, "attn_mask_type": mask_type, "device": "cuda"}
    assert te.attention_backends(**question).chosen == "cudnn_fp8"
    steps_of(core_of(Case(mask_type, size=size)), Case(mask_type, size=size), "cuda", 1)


def test_what_cudnn_leaves_out():
    question = {"fp8": True, "kv_channels": 128, "device": "cuda"}
    table = te.attention_backends(
        attn_mask_type="causal_bottom_right", max_seqlen_q=64, max_seqlen_kv=128, **question
    )
    assert "cuDNN 9" in table["cudnn_fp8"] and table.chosen == "unfused"
