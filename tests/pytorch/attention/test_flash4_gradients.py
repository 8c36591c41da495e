"""flash-attn 4 on parts of one projection: its backward writes into the projection's gradient.

On the CPU a stand-in takes the place of the package. On a GPU the package itself runs, if it is
installed.
"""

from functools import wraps
from types import SimpleNamespace

import attention_reference as reference
import pytest
import torch
from cases import fake_flash_attn
from cases.attention_matrix import norm_error

from transformer_engine.pytorch.attention import DotProductAttention, attention_backends
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import flash4
from transformer_engine.pytorch.attention.core.projections import HeadLayout, split_qkv

LAYOUTS = [
    HeadLayout(4, 4, 64, True),
    HeadLayout(4, 4, 64, False),
    HeadLayout(4, 2, 64, False),
]
KINDS = [{}, {"attn_mask_type": "no_mask"}, {"window_size": (2, 0)}, {"softmax_scale": 0.3}]
pytestmark = pytest.mark.filterwarnings("ignore:Argument .* cannot be converted to a JitArgument")


def without_backward(package):
    del package.interface._flash_attn_bwd


def without_interface(package):
    del package.interface


def of_other_parameters(package):
    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False):
        raise AssertionError("called with parameters that it may not have")

    package.interface._flash_attn_bwd = backward


def without_statistics(package):
    attend = package.flash_attn_func

    def attend_alone(q, k, v, **said):
        return attend(q, k, v, **said)

    package.flash_attn_func = attend_alone


@pytest.fixture
def package(monkeypatch):
    """Chooses flash-attn 4, as a stand-in whose `calls` records the calls of its backward."""
    package = fake_flash_attn.module("flash4")
    package.calls = []
    backward = package.interface._flash_attn_bwd

    @wraps(backward)
    def record(*args, **said):
        package.calls.append(SimpleNamespace(**said))
        return backward(*args, **said)

    package.interface._flash_attn_bwd = record
    monkeypatch.setattr(flash4.KERNELS, "_module", package)
    monkeypatch.setattr(core, "choose", lambda *call: flash4.BACKEND)
    return package


def project(layout, qkv_format, sequence=7, device="cpu"):
    """Returns the output of a projection of a batch of two."""
    lead = (sequence, 2) if qkv_format == "sbhd" else (2, sequence)
    features = (layout.heads + 2 * layout.groups) * layout.size
    return torch.randn(*lead, features, device=device, dtype=torch.bfloat16, requires_grad=True)


def attention(layout, qkv_format, **said):
    return DotProductAttention(
        layout.heads, layout.size, layout.groups, qkv_format=qkv_format, **said
    )


def by_definition(x, upstream, layout, qkv_format, said):
    """Returns the result and the gradient of the projection, computed on the CPU."""
    exact = x.detach().cpu().double().requires_grad_()
    batched, upstream = (
        y.transpose(0, 1) if qkv_format == "sbhd" else y for y in (exact, upstream.cpu().double())
    )
    of_window = (said.get("attn_mask_type", "causal"), said.get("window_size"))
    sequence = batched.shape[1]
    seen = reference.seen_keys(*of_window, sequence, sequence, [(sequence, sequence)] * 2)
    parts = split_qkv(batched, layout)
    out = reference.attention(*parts, seen, said.get("softmax_scale")).flatten(2)
    (gradient,) = torch.autograd.grad(out, exact, upstream)
    return (out.transpose(0, 1) if qkv_format == "sbhd" else out), gradient


def check(x, layout, qkv_format, **said):
    """Compares with the definition; returns the gradient of the projection."""
    out = attention(layout, qkv_format, **said)(*split_qkv(x, layout))
    upstream = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    expected, of_projection = by_definition(x, upstream, layout, qkv_format, said)
    assert norm_error(out, expected) < 1e-2
    assert norm_error(gradient, of_projection) < 2e-2
    return gradient


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("said", KINDS, ids=str)
def test_gradients_are_written_where_they_stay(package, layout, qkv_format, said):
    gradient = check(project(layout, qkv_format), layout, qkv_format, **said)
    (call,) = package.calls
    assert call.dq.data_ptr() == gradient.data_ptr()
    memory = {x.untyped_storage().data_ptr() for x in (call.dq, call.dk, call.dv, gradient)}
    assert memory == {gradient.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    "lacks", [without_backward, without_interface, of_other_parameters, without_statistics]
)
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_another_version_of_the_package_makes_gradients_itself(package, lacks, qkv_format):
    lacks(package)
    for layout in LAYOUTS:
        check(project(layout, qkv_format), layout, qkv_format, window_size=(2, 0))
    assert not package.calls


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_tensors_of_their_own_get_gradients_of_their_own(package, qkv_format):
    layout = LAYOUTS[0]
    inputs = [torch.randn(2, 7, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = attention(layout, qkv_format)(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    (call,) = package.calls
    for written, gradient in zip((call.dq, call.dk, call.dv), gradients, strict=True):
        assert written.data_ptr() == gradient.data_ptr() and gradient.is_contiguous()


def test_sinks_and_inference_take_the_public_way(package):
    """They call the public function, and do not ask it for the log-sum-exp."""
    attend = package.flash_attn_func

    @wraps(attend)
    def public(*args, **said):
        assert "return_lse" not in said
        return attend(*args, **said)

    package.flash_attn_func = public
    layout = LAYOUTS[0]
    whole = split_qkv(project(layout, "bshd"), layout)
    attention(layout, "bshd", softmax_type="off-by-one")(*whole).sum().backward()
    with torch.no_grad():
        attention(layout, "bshd")(*whole)
    assert not package.calls


def test_determinism_reaches_the_backward(package, monkeypatch):
    layout = LAYOUTS[0]
    for deterministic in (False, True):
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", str(1 - deterministic))
        check(project(layout, "bshd"), layout, "bshd")
        assert package.calls.pop().deterministic is deterministic


@pytest.fixture
def on_gpu(monkeypatch):
    """Chooses the package itself; skips the test if it cannot run."""
    reason = attention_backends(device="cuda")["flash4"]
    if reason is not None:
        pytest.skip(f"flash4 {reason}")
    monkeypatch.setattr(core, "choose", lambda *call: flash4.BACKEND)


@pytest.mark.gpu
@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_flash_attn_4_writes_one_gradient(on_gpu, layout, size, qkv_format):
    layout = layout._replace(size=size)
    x = project(layout, qkv_format, 200, "cuda")
    check(x, layout, qkv_format, window_size=(2, 0))
    check(x, layout, qkv_format)
    out = attention(layout, qkv_format)(*split_qkv(x, layout))
    upstream = torch.randn_like(out)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out, x, upstream)
    names = {event.name for event in profile.events()}
    assert names.isdisjoint({"aten::cat", "aten::stack", "aten::copy_"})


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_flash_attn_4_repeats_gradients(on_gpu, monkeypatch, layout, size):
    """Gradients repeat bit for bit if NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    layout = layout._replace(size=size)
    x = project(layout, "bshd", 1000, "cuda")
    out = attention(layout, "bshd")(*split_qkv(x, layout))
    upstream = torch.randn_like(out)
    first, *others = (torch.autograd.grad(out, x, upstream, retain_graph=True)[0] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)
