"""Activations: definition, gradients, FP8 outputs of delayed and current scaling, errors."""

import fp8_reference as fp8
import pytest
import torch
from cases import activation as cases
from cases.activation import inputs
from rulers import assert_bitwise, assert_codes_close

from transformer_engine.pytorch.kernels import activation as op

# fp32 arithmetic plus one rounding to the dtype; half an ulp is 2^-11 and 2^-8.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
EXACT = {"relu", "srelu", "reglu", "sreglu"}  # no transcendental function: bitwise on both devices


def assert_column_sums(got, terms):
    """Asserts sums in fp32, of terms that have errors of a few fp32 roundings themselves."""
    terms = terms.double().cpu()
    bound = (len(terms) + 64) * 2.0**-24 * terms.abs().sum(0) + 1e-6
    assert bool(((got.double().cpu() - terms.sum(0)).abs() <= bound).all())


def close(got, expected, dtype, roundings=1):
    torch.testing.assert_close(
        got.double().cpu(), expected.double().cpu(), rtol=roundings * TOLERANCE[dtype], atol=2e-6
    )


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("name", cases.KINDS)
def test_forward_and_backward_follow_the_definition(name, shape, device):
    for dtype in fp8.HIGH_PRECISION:
        x, dy = inputs(name, *shape, dtype, device)
        kind = op.activation_kind(name)
        y = op.activation_forward(x, kind)[0]
        assert y.dtype == dtype and y.shape == dy.shape
        close(y, cases.reference(name, x.double()), dtype)
        dx, *absent, dbias = op.activation_backward(dy, x, kind, dbias=torch.float32)
        assert absent == [None, None, None]
        expected = cases.reference_backward(name, dy, x)
        close(dx, expected, dtype)
        assert_column_sums(dbias, expected)


@pytest.mark.parametrize("name", ["silu", "geglu"])
def test_leading_sizes_are_rows(name, device):
    x, dy = inputs(name, 12, 16, torch.bfloat16, device)
    kind = op.activation_kind(name)
    flat = op.activation_backward(dy, x, kind, plain=True)[0]
    cube = op.activation_backward(dy.view(2, 6, 16), x.view(2, 6, -1), kind, plain=True)[0]
    assert cube.shape == (2, 6, x.shape[-1])
    assert torch.equal(cube.view_as(flat), flat)


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("name", cases.KINDS)
def test_delayed_scaling_rounds_once_from_fp32(name, shape, format, device):
    """The codes and the amax are those of the reference, which is not rounded to `dtype`."""
    for dtype in fp8.HIGH_PRECISION:
        x, dy = inputs(name, *shape, dtype, device)
        kind = op.activation_kind(name)
        scale = torch.tensor([3.0], device=device)
        args = dict(plain=True, format=format, scale=scale, rowwise=True, columnwise=True)
        forward = op.activation_forward(
            x, kind, amax=(amax := torch.zeros(1, device=device)), **args
        )
        check_delayed(forward, cases.reference(name, x.double()), amax, format, dtype)
        backward = op.activation_backward(
            dy, x, kind, amax=(amax := torch.zeros(1, device=device)), dbias=dtype, **args
        )
        expected = cases.reference_backward(name, dy, x)
        check_delayed(backward[:4], expected, amax, format, dtype)
        assert backward[4].dtype == dtype


def check_delayed(results, expected, amax, format, dtype):
    plain, rowwise, columnwise, scales = results
    close(plain, expected, dtype)
    assert_codes_close(rowwise, fp8.encode(expected, format, 3.0).to(rowwise.device))
    rows = rowwise.reshape(-1, rowwise.shape[-1]) if rowwise.numel() else rowwise
    assert torch.equal(columnwise, rows.t())
    assert scales.tolist() == pytest.approx([1 / 3, 3.0], rel=1e-7)
    assert amax.item() == pytest.approx(fp8.amax(expected), rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("sides", [(True, False), (False, True)], ids=["row", "column"])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_each_side_alone_and_without_the_plain_result(name, sides, device):
    x, dy = inputs(name, 66, 48, torch.bfloat16, device)
    kind = op.activation_kind(name)
    scale = torch.tensor([2.0], device=device)
    both = dict(plain=False, scale=scale, rowwise=True, columnwise=True)
    one = dict(plain=False, scale=scale, rowwise=sides[0], columnwise=sides[1])
    for call in (
        lambda **k: op.activation_forward(x, kind, **k),
        lambda **k: op.activation_backward(dy, x, kind, dbias=torch.float32, **k),
    ):
        whole, part = call(**both), call(**one)
        assert whole[0] is None and part[0] is None
        for side in (0, 1):
            if sides[side]:
                assert torch.equal(part[1 + side], whole[1 + side])
            else:
                assert part[1 + side] is None
        for a, b in zip(whole[3:], part[3:], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(64, 128), (33, 257), (0, 16)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "relu", "swiglu"])
def test_current_scaling_takes_the_amax_of_the_rounded_result(name, shape, device):
    for dtype in fp8.HIGH_PRECISION:
        x, dy = inputs(name, *shape, dtype, device)
        kind = op.activation_kind(name)
        for power_of_2 in (False, True):
            amax = torch.full((1,), 7.0, device=device)
            args = dict(current=True, epsilon=1e-6, power_of_2=power_of_2, amax=amax)
            for plain, *sides, scales in (
                op.activation_forward(x, kind, **args),
                op.activation_backward(dy, x, kind, dbias=torch.float32, **args)[:4],
            ):
                assert sides == [None, None]
                largest = fp8.amax(plain)
                bounded = torch.tensor(max(largest, 1e-6))
                scale = torch.tensor(448.0) / bounded
                if power_of_2:
                    scale = torch.exp2(torch.floor(torch.log2(scale)))
                assert scales[1].item() == scale.item()
                assert scales[0].item() == (1 / scale).item()
            assert amax.item() == largest


@pytest.mark.parametrize("name", cases.KINDS)
def test_amax_is_raised_not_replaced(name, device):
    x, dy = inputs(name, 8, 16, torch.float32, device)
    kind = op.activation_kind(name)
    amax = torch.full((1,), 1e6, device=device)
    scale = torch.ones(1, device=device)
    op.activation_forward(x, kind, scale=scale, amax=amax, rowwise=True)
    op.activation_backward(dy, x, kind, scale=scale, amax=amax, rowwise=True)
    assert amax.item() == 1e6


def forward_and_backward(name, x, dy, format, device):
    """All results of forward and backward with delayed scaling."""
    kind = op.activation_kind(name)
    x, dy = x.to(device), dy.to(device)
    scale = torch.tensor([5.0], device=device)
    args = dict(plain=True, format=format, scale=scale, rowwise=True, columnwise=True)
    forward = op.activation_forward(x, kind, **args)
    return forward, op.activation_backward(dy, x, kind, dbias=torch.float32, **args)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*cases.SHAPES, (256, 1024)], ids=str)
@pytest.mark.parametrize("name", cases.KINDS)
def test_cuda_agrees_with_the_cpu(name, shape):
    for dtype in fp8.HIGH_PRECISION:
        x, dy = inputs(name, *shape, dtype, "cpu")
        for format in fp8.FORMATS:
            cpu = forward_and_backward(name, x, dy, format, "cpu")
            cuda = forward_and_backward(name, x, dy, format, "cuda")
            for got, want in zip(cuda, cpu, strict=True):
                assert_agree(got, want, dtype, exact=name in EXACT)
            assert_column_sums(cuda[1][4], cases.reference_backward(name, dy, x))


def assert_agree(cuda, cpu, dtype, exact):
    for i in range(3):
        if exact:
            assert_bitwise(cuda[i], cpu[i])
        elif i == 0:
            close(cuda[i], cpu[i], dtype, roundings=2)
        else:
            assert_codes_close(cuda[i], cpu[i])
    assert_bitwise(cuda[3], cpu[3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_views_that_are_not_aligned_take_the_general_path(name):
    """A tensor that starts one element into its storage cannot be read 16 bytes at a time."""
    rows, n, kind = 64, 128, op.activation_kind(name)
    x, dy = inputs(name, rows, n, torch.bfloat16, "cuda")
    scale = torch.ones(1, device="cuda")
    args = dict(scale=scale, rowwise=True, columnwise=True, dbias=torch.float32)
    *aligned, sums = op.activation_backward(dy, x, kind, **args)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
    shifted.copy_(x)
    *general, general_sums = op.activation_backward(dy, shifted, kind, **args)
    close(general[0], aligned[0], x.dtype, roundings=2)
    assert_codes_close(general[1], aligned[1])
    assert_codes_close(general[2], aligned[2])
    torch.testing.assert_close(general_sums, sums, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_a_captured_graph_replays_to_the_same_results(name):
    kind = op.activation_kind(name)
    x, dy = inputs(name, 130, 256, torch.bfloat16, "cuda")
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def work():
        delayed = dict(scale=scale, amax=amax, rowwise=True, columnwise=True)
        return (
            *op.activation_forward(x, kind, **delayed),
            *op.activation_backward(dy, x, kind, dbias=torch.float32, **delayed),
            *op.activation_forward(x, kind, current=True)[::3],
        )

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # allocates the workspaces of the stream before the capture
        expected = [t.clone() for t in work()]
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = work()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_more_elements_than_an_int_can_count():
    rows, cols = 65536 + 64, 32768
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3.0
    scale = torch.ones(1, device="cuda")
    kind = op.activation_kind("relu")
    y, rowwise, columnwise, _ = op.activation_forward(
        x, kind, scale=scale, rowwise=True, columnwise=True
    )
    for result in (y, rowwise, columnwise):
        assert result[-1, -1].item() != 0
        assert torch.count_nonzero(result).item() == 1


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shape", cases.SANITIZE_SHAPES, ids=str)
@pytest.mark.parametrize("name", ["gelu", "srelu", "swiglu"])
def test_under_the_sanitizer(name, shape):
    kind, scale = op.activation_kind(name), torch.ones(1, device="cuda")
    amax = torch.zeros(1, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = inputs(name, *shape, dtype, "cuda")
        delayed = dict(scale=scale, amax=amax, rowwise=True, columnwise=True)
        op.activation_forward(x, kind, **delayed)
        op.activation_forward(x, kind, current=True)
        op.activation_backward(dy, x, kind, dbias=dtype, **delayed)
        op.activation_backward(dy, x, kind, dbias=dtype, current=True)
    torch.cuda.synchronize()


def test_compiled_with_fake_tensors(device):
    x, dy = inputs("swiglu", 16, 32, torch.bfloat16, device)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    kind = op.activation_kind("swiglu")

    def both(x, dy):
        forward = op.activation_forward(
            x, kind, plain=False, scale=scale, amax=amax, rowwise=True, columnwise=True
        )
        backward = op.activation_backward(dy, x, kind, dbias=torch.float32, current=True)
        assert forward[0] is None and backward[1] is None
        return [t for t in (*forward, *backward) if t is not None]

    expected = both(x, dy)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)(x, dy)
    for got, want in zip(compiled, expected, strict=True):
        assert torch.equal(got, want)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(NotImplementedError, match=r"one of gelu, geglu, .*, got 'tanh'"):
        op.activation_kind("tanh")
    assert op.activation_kind("squared_relu") == op.activation_kind("srelu")


X = torch.ones(4, 6)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: op.activation_forward(torch.ones(4, 7), 1),
            ValueError,
            r"even last size.*\(4, 7\)",
        ),
        (
            lambda: op.activation_forward(X.int(), 0),
            TypeError,
            "float16 or bfloat16 for x, got int32",
        ),
        (lambda: op.activation_forward(X.t(), 0), ValueError, "expected x to be contiguous"),
        (
            lambda: op.activation_forward(X, 0, False),
            ValueError,
            "plain or an FP8 output, got neither",
        ),
        (lambda: op.activation_forward(X, 10), ValueError, "0 to 9, 11 or 13, got 10"),
        (lambda: op.activation_forward(X, 11, limit=0.0), ValueError, "limit above 0, got 0"),
        (lambda: op.activation_forward(X, 11, alpha=-1.0), ValueError, "alpha above 0, got -1"),
        (
            lambda: op.activation_backward(X[:, :3], X, 11, offset=float("nan")),
            ValueError,
            "expected a finite offset, got nan",
        ),
        (
            lambda: op.activation_forward(X, 0, False, current=True, rowwise=True),
            ValueError,
            "expected a tensor for y, got none",
        ),
        (
            lambda: op.activation_forward(X, 0, scale=ONE, current=True, rowwise=True),
            ValueError,
            "FP8 outputs or a current scale, got both",
        ),
        (
            lambda: op.activation_forward(X, 0, format=3, scale=ONE, rowwise=True),
            TypeError,
            "expected an FP8 format, got float16",
        ),
        (
            lambda: op.activation_backward(X, X, 1),
            ValueError,
            r"expected shape \(4, 3\) for dy, got \(4, 6\)",
        ),
        (lambda: op.activation_backward(X.half(), X, 0), TypeError, "float32 for dy, got float16"),
        (lambda: op.activation_backward(X, X, 0, False), ValueError, "dx, an FP8 output or dbias"),
        (
            lambda: op.activation_backward(X, X, 0, amax=torch.zeros(1, dtype=torch.float16)),
            TypeError,
            "expected float32 for amax, got float16",
        ),
        (
            lambda: op.activation_forward(X, 0, amax=torch.zeros(0)),
            ValueError,
            "expected 1 element for amax",
        ),
        (
            lambda: op.activation_backward(X, X, 0, dbias=torch.float64),
            TypeError,
            "bfloat16 for dbias, got float64",
        ),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
