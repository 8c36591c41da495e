"""The cache of cuBLASLt plans of gemm: reuse, streams, capture, algorithms, a missing library."""

import ctypes
import os
import re
import subprocess
import sys

import gemm_reference as ref
import pytest
import torch
from gemm_reference import E4M3, assert_close, product, slack

from transformer_engine import _C, _devices
from transformer_engine.pytorch.kernels import gemm as gemm_kernel
from transformer_engine.pytorch.kernels.gemm import gemm, gemm_into

pytestmark = pytest.mark.gpu


def both(shape, kind, layout="TN"):
    a, b = ref.operands(*shape, kind, layout)
    return a.to("cuda"), b.to("cuda")


def multiply(a, b, out=torch.bfloat16, **options):
    return gemm(a.data, b.data, out, **ref.arguments(a, b), **options)


@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
def test_a_plan_is_built_once(kind):
    if kind is not torch.bfloat16 and not _devices.device_limits(0).fp8_products:
        pytest.skip("bf16 products with and without a bias have one plan")
    shape = (80, 48, 112) if kind is torch.bfloat16 else (80, 48, 144)
    a, b = both(shape, kind)
    other_a, other_b = both(shape, kind)
    before = _C.gemm_plan_count()
    first = multiply(a, b)
    assert _C.gemm_plan_count() == before + 1
    assert_close(
        multiply(other_a, other_b), product(other_a, other_b), slack(other_a, other_b, "cuda")
    )
    assert multiply(a, b).equal(first)
    assert _C.gemm_plan_count() == before + 1
    multiply(a, b, bias=torch.ones(48, dtype=torch.bfloat16, device="cuda"))
    assert _C.gemm_plan_count() == before + 2


def test_pointers_are_those_of_the_call():
    a, b = both((32, 48, 64), (E4M3, E4M3))
    for bias_value in (1.0, -2.0):
        bias = torch.full((48,), bias_value, dtype=torch.bfloat16, device="cuda")
        a.scales = a.scales * 2
        a.values = a.values * 2
        assert_close(multiply(a, b, bias=bias), product(a, b) + bias_value, slack(a, b, "cuda"))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_unaligned_tensors(offset):
    a, b = both((24, 40, 56), torch.bfloat16)
    storage = torch.empty(24 * 56 + offset, dtype=torch.bfloat16, device="cuda")
    a.data = storage[offset:].view(24, 56).copy_(a.data)
    assert_close(multiply(a, b), product(a, b), slack(a, b, "cuda"))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(64, 96, 128), (8192, 4096, 4096)], ids=str)
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_a_bias_may_lie_anywhere(offset, shape, kind, recwarn):
    """A bias may be part of a flat buffer of all parameters. FP8 products still run in FP8."""
    a, b = both(shape, kind)
    out = torch.float32 if kind is torch.float32 else torch.bfloat16
    bias = torch.randn(shape[1] + offset, device="cuda").to(out)[offset:]
    gemm_kernel._announce_slow_product.cache_clear()
    expected = multiply(a, b, out, bias=bias.clone())
    recwarn.clear()
    close = {"rtol": 1.6e-2, "atol": 1e-2 * expected.abs().max().item()}
    torch.testing.assert_close(multiply(a, b, out, bias=bias), expected, **close)
    assert not recwarn.list


def test_unaligned_fp8_is_multiplied_in_bf16():
    a, b = both((32, 48, 64), (E4M3, E4M3))
    storage = torch.empty(32 * 64 + 1, dtype=torch.uint8, device="cuda")
    a.data = storage[1:].view(32, 64).copy_(a.data)
    gemm_kernel._announce_slow_product.cache_clear()
    with pytest.warns(UserWarning, match="bf16 products of the FP8 codes"):
        d = multiply(a, b)
    assert_close(d, product(a, b), slack(a, b, "cuda"))


def test_two_streams():
    pairs = [both((512, 768, 2048), torch.bfloat16, layout) for layout in ("TN", "NT")]
    expected = [multiply(a, b) for a, b in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    results = [[], []]
    for _ in range(20):
        for stream, (a, b), own_results in zip(streams, pairs, results, strict=True):
            with torch.cuda.stream(stream):
                own_results.append(multiply(a, b))
    torch.cuda.synchronize()
    for own_results, result in zip(results, expected, strict=True):
        assert all(r.equal(result) for r in own_results)


@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
def test_capture(kind):
    a, b = both((64, 96, 128), kind)
    main_grad = torch.zeros(64, 96, device="cuda")
    options = ref.arguments(a, b)

    def work():
        y = gemm(a.data, b.data, torch.bfloat16, **options)
        gemm_into(main_grad, a.data, b.data, **options)
        return y

    eager = work().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    main_grad.zero_()
    captured.zero_()
    graph.replay()
    graph.replay()
    assert captured.equal(eager)
    assert_close(main_grad, 2 * product(a, b), 2 * slack(a, b, "cuda"))


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
def test_launches_of_a_gemm_of_many_tiles(kind, ranks, count, monkeypatch):
    """Where several ranks train, a launch sets the counter of tiles to zero first."""
    if torch.cuda.get_device_capability() != (9, 0) or int(torch.version.cuda.split(".")[0]) < 13:
        pytest.skip("how tiles are assigned was measured on Hopper, with cuBLASLt 13")
    a, b = both((4096, 4096, 64), kind)
    torch.cuda.synchronize()
    handle = ctypes.c_void_p()  # a stream that no test has used: torch's are of a pool
    torch.cuda.check_error(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        with monkeypatch.context() as patched:  # a profiler would ask for the other ranks
            patched.setattr(torch.distributed, "is_initialized", lambda: ranks > 1)
            patched.setattr(torch.distributed, "get_world_size", lambda: ranks)
            multiply(a, b)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            multiply(a, b)
    launches = [event for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(launches) == count, [event.name for event in launches]


@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
def test_algorithms_can_be_described_and_used(kind):
    a, b = both((512, 256, 1024), kind)
    multiply(a, b)
    assert _C.gemm_problem().startswith("{512, 256, 1024, DType::")
    _C.gemm_use_guess()
    first = multiply(a, b)
    guesses = _C.gemm_guesses(8)
    assert guesses[0] == _C.gemm_algorithm()
    assert _C.gemm_use(guesses[0])
    assert multiply(a, b).equal(first)
    for algorithm in guesses[1:] + _C.gemm_neighbours(guesses[0])[:8]:
        if _C.gemm_use(algorithm):
            assert_close(multiply(a, b), product(a, b), slack(a, b, "cuda"))
    assert not _C.gemm_use([9999, *guesses[0][1:]])
    _C.gemm_use_guess()


@pytest.mark.parametrize("kind", [torch.bfloat16, (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("layout", ["TN", "NT"])
def test_products_of_many_sizes_share_algorithms(kind, layout):
    """As those of experts: of the tokens alone, which are rows of the result, or terms of sums."""
    algorithms = {}
    for tokens in range(1040, 1040 + 80 * 16, 16):
        shape = (tokens, 48, 144) if layout == "TN" else (144, 48, tokens)
        a, b = both(shape, kind, layout)
        assert_close(multiply(a, b), product(a, b), slack(a, b, "cuda"))
        algorithms[tokens] = _C.gemm_algorithm()
    assert len({tuple(algorithms[tokens]) for tokens in range(2064, 2304, 16)}) == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/libcublasLt.so", r"expected a library at TE_CUBLASLT_PATH=/nowhere/"),
        ("libc.so.6", r"expected the function cublasLt\w+ in .*libc.so.6, got none"),
    ],
)
def test_missing_library(path, message):
    script = (
        "import torch\n"
        "from transformer_engine.pytorch.kernels.gemm import gemm\n"
        "x = torch.ones(16, 16, device='cuda')\n"
        "try:\n"
        "    gemm(x, x, torch.float32)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TE_CUBLASLT_PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(message, done.stdout), done.stdout
