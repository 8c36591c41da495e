"""Products of fp32 operands follow torch's setting of TF32, as `nn.Linear` does."""

from contextlib import contextmanager

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch._torch_private import allows_tf32
from transformer_engine.pytorch.kernels import gemm

SETTINGS = {
    "highest": False,
    "high": True,
    "medium": True,
}


@contextmanager
def setting(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def train(module, x):
    module.zero_grad()
    out = module(x)
    out.sum().backward()
    return out, module.weight.grad


@pytest.mark.parametrize("name", SETTINGS)
def test_the_setting_is_read(name):
    with setting(name):
        assert allows_tf32() is SETTINGS[name]
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            for precision in ("tf32", "ieee"):  # torch's older getters raise an error after this
                torch.backends.cuda.matmul.fp32_precision = precision
                assert allows_tf32() is (precision == "tf32")
    assert not allows_tf32(), "torch's default"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_product_follows(compiled, monkeypatch):
    """After a change of the setting, forward and backward are recorded again."""
    seen = []
    define = gemm._define

    def watched(*arguments):
        seen.append(arguments[-1])
        define(*arguments)

    monkeypatch.setattr(gemm, "_define", watched)
    module, x = te.Linear(16, 16, device="cpu"), torch.ones(4, 16, requires_grad=True)
    run = torch.compile(module, backend="aot_eager") if compiled else module
    for _ in range(2):
        for name, allowed in SETTINGS.items():
            with setting(name):
                for _ in range(3):
                    run(x).sum().backward()
            assert set(seen) == {allowed}, name
            assert len(seen) >= 9
            seen.clear()
    with setting("high"):
        te.Linear(16, 16, device="cpu", params_dtype=torch.bfloat16)(x.bfloat16())
    with setting("highest"):
        out = run(x)
    seen.clear()
    with setting("high"):
        out.sum().backward()
    assert set(seen) == {True}, "the setting of the backward, as of torch's layers"


# ---- On a GPU ----


@pytest.mark.gpu
def test_a_layer_rounds_as_torch_does():
    """The error shows which format was used: fp32 has 24 significant bits, TF32 has 11."""
    torch.manual_seed(0)
    x = torch.randn(512, 1024, device="cuda", requires_grad=True)
    ours = te.Linear(1024, 512, device="cuda")
    theirs = torch.nn.Linear(1024, 512, device="cuda")
    theirs.load_state_dict(ours.state_dict(), strict=False)
    exact = x.detach().double() @ ours.weight.detach().double().t() + ours.bias.double()
    exact_grad = x.detach().double().sum(0).expand(512, -1)
    for name, allowed in (*SETTINGS.items(), *SETTINGS.items()):
        with setting(name):
            found = [train(module, x) for module in (ours, theirs)]
        for out, grad in found:
            for value, expected in ((out, exact), (grad, exact_grad)):
                error = ((value.double() - expected).norm() / expected.norm()).item()
                assert (error > 1e-5) is allowed, (name, error)
