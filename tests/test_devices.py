"""What GPUs of all generations get, tested without such GPUs."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from transformer_engine import _devices, _env

torch = pytest.importorskip("torch")
kernel = pytest.importorskip("transformer_engine.pytorch.kernels.gemm")

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "gpus.md"
OFF = _env.DeviceVariables(False, False, False, 99 * 1024)


def test_the_page_shows_the_table():
    table = _devices.table()
    assert table in PAGE.read_text(), f"put this into {PAGE.name}:\n{table}"


def test_the_page_lists_the_variables():
    text = PAGE.read_text()
    assert all(f"`{name}=" in text for name in _env._DEVICE)


@pytest.mark.parametrize("one", _devices.GENERATIONS, ids=lambda one: str(one.capability))
def test_limits_of_a_generation(one):
    capability = divmod(one.capability, 10)
    limits = _devices.limits_of(capability)
    assert limits.shared_bytes == one.shared_kib * 1024
    assert (limits.cluster > 1) is limits.dependent_launch is (capability >= (9, 0))
    assert limits.fp8_products is (capability >= (8, 9))
    assert limits.block_scales is (capability == (9, 0))
    off = _devices.limits_of(capability, OFF)
    assert (off.cluster, off.dependent_launch, off.fp8_products) == (1, False, False)
    assert off.shared_bytes == 99 * 1024
    assert off.fp8_conversion is limits.fp8_conversion


@pytest.mark.parametrize(
    ("capability", "in_blocks", "on", "reason"),
    [
        ((8, 0), False, None, "need compute capability 8.9, this GPU has 8.0"),
        ((8, 9), False, None, ""),
        ((8, 9), True, None, "need compute capability 9.0, this GPU has 8.9"),
        ((9, 0), True, None, ""),
        ((9, 0), False, OFF, "switched off by TE_FP8_TENSOR_CORES=0"),
        ((9, 0), True, OFF, "switched off by TE_FP8_TENSOR_CORES=0"),
        ((12, 1), False, None, ""),
        ((12, 1), True, None, "need compute capability 9.0, this GPU has 12.1"),
    ],
)
def test_why_cublaslt_does_not_multiply(capability, in_blocks, on, reason):
    found = _devices.why_no_product(_devices.limits_of(capability, on), in_blocks)
    assert found.endswith(reason) and bool(found) == bool(reason)


def test_variables(monkeypatch):
    assert _env.device_variables() == _env.DeviceVariables()
    for name, value in zip(_env._DEVICE, ("0", " 0 ", "1", "99"), strict=True):
        monkeypatch.setenv(name, value)
    assert _env.device_variables() == _env.DeviceVariables(False, False, True, 99 * 1024)
    for wrong in ("47", "99k", "-1"):
        monkeypatch.setenv("TE_SHARED_MEMORY_KIB", wrong)
        with pytest.raises(ValueError, match=f"TE_SHARED_MEMORY_KIB of at least 48, got '{wrong}'"):
            _env.device_variables()


@pytest.mark.parametrize("formats", [(5, 5), (5, 6), (6, 5)], ids=str)
def test_products_of_codes_are_those_of_the_definition(device, formats):
    codes = [torch.randint(0, 0x7C, (n, 64), dtype=torch.uint8) for n in (48, 32)]
    codes = [c | torch.randint_like(c, 2) << 7 for c in codes]
    values = [c.view(kernel.TORCH_FP8[f]).double() for c, f in zip(codes, formats, strict=True)]
    found = kernel._product_of_codes(*(c.to(device) for c in codes), *formats).cpu()
    exact, bound = values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t()
    assert ((found.double() - exact).abs() <= 64 * 2.0**-23 * bound).all()


def announced(monkeypatch, capability, layout, sizes=(128, 256, 512), on=None):
    """Returns the warnings about a GEMM on a pretended GPU."""
    limits = _devices.limits_of(capability, on)
    monkeypatch.setattr(_devices, "device_limits", lambda index: limits)
    kernel._announce_slow_product.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            kernel._announce_replacement(0, sizes, kernel.layout_of(layout))
    return [str(one.message) for one in found]


def test_a_replaced_product_is_announced_once(monkeypatch):
    whole, blocks = 5, 5 + 16
    (text,) = announced(monkeypatch, (8, 0), whole)
    assert text == (
        "[gemm] FP8 tensor cores need compute capability 8.9, this GPU has 8.0: "
        + _devices.replacement(in_blocks=False)
    )
    (text,) = announced(monkeypatch, (10, 0), blocks)
    assert "compute capability 9.0" in text and "dequantised" in text
    (text,) = announced(monkeypatch, (9, 0), whole)
    assert "no kernel for FP8 operands at m = 128, n = 256, k = 512" in text
    assert announced(monkeypatch, (10, 0), blocks, sizes=(0, 256, 512)) == []
    assert announced(monkeypatch, (10, 0), blocks, sizes=(128, 64, 512)) == []


PROGRAM = """
import sys, torch
import transformer_engine.pytorch as te
torch.manual_seed(0)
layer = te.LayerNormLinear(3072, 512, params_dtype=torch.bfloat16, device="cuda")
x = torch.randn(256, 3072, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with te.autocast():
    y = layer(x)
y.float().square().mean().backward()
torch.save([t.detach().float().cpu() for t in (y, x.grad, layer.weight.grad)], sys.argv[1])
"""


@pytest.mark.gpu
def test_a_layer_with_every_feature_off(tmp_path):
    """Two processes, since variables are read at import. Results differ by the order of sums."""
    off = {**dict.fromkeys(_env._DEVICE[:3], "0"), "TE_SHARED_MEMORY_KIB": "99"}
    results = []
    for name, variables in (("on", {}), ("off", off)):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / name)]
        subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=50)
        results.append(torch.load(tmp_path / name))
    for native, portable in zip(*results, strict=True):
        error = (portable - native).square().sum() / native.square().sum()
        assert error < 1e-3
