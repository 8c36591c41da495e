"""softmax on both backends: compared with the definition in float64, special values, errors."""

import pytest
import torch
from cases import softmax as cases
from rulers import assert_bitwise

from transformer_engine import _C
from transformer_engine.pytorch.kernels.softmax import softmax_backward, softmax_forward

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALE = 0.3
# Scores up to 30 have errors of 30 * 2^-23 in fp32; the sum of exponentials adds a small error.
FP32_ERROR = 2e-5
NAN, INFINITY = float("nan"), float("inf")


def assert_close(actual, exact, error=FP32_ERROR):
    """Allows the fp32 error, one rounding to the dtype, and denormals that become zero."""
    info = torch.finfo(actual.dtype)
    smallest_step = info.tiny * info.eps
    bound = exact.abs() * (error + info.eps) + torch.finfo(torch.float32).tiny + smallest_step
    assert actual.shape == exact.shape
    assert ((actual.cpu().double() - exact).abs() <= bound).all()


def run(case, device, dtype, scale=SCALE):
    x = (torch.randn(case.shape) * 6).to(dtype)
    mask = case.make_mask(device)
    y = softmax_forward(x.to(device), mask, scale, *case.window)
    return y, cases.reference(x, scale, cases.hidden(case, mask))


@pytest.mark.parametrize("case", cases.ALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(device, case, dtype):
    y, exact = run(case, device, dtype)
    assert y.dtype == dtype
    assert_close(y, exact)
    assert ((y.cpu() == 0) | (exact != 0)).all(), "hidden keys are exactly zero"


def backward_reference(dy, y, scale):
    dy, y = dy.double(), y.double()
    dot = (dy * y).sum(-1, keepdim=True)
    magnitude = scale * y * (dy.abs() + (dy * y).abs().sum(-1, keepdim=True))
    return scale * y * (dy - dot), magnitude


def assert_gradient(dx, dy, y):
    exact, magnitude = backward_reference(dy, y, SCALE)
    info = torch.finfo(dx.dtype)
    bound = magnitude * 1e-5 + exact.abs() * info.eps + info.tiny * info.eps
    assert ((dx.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("keys", [*cases.KEYS, 17001, 32776, 33000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(device, keys, dtype):
    shape = (1, 2, 3, keys)
    y = torch.softmax(torch.randn(shape) * 3, -1).to(dtype)
    y[:, :, 0] = 0
    dy = torch.randn(shape).to(dtype)
    dx = softmax_backward(dy.to(device), y.to(device), SCALE)
    assert dx.dtype == dtype
    assert_gradient(dx, dy, y)
    assert (dx[:, :, 0] == 0).all(), "a row that sees no key has no gradient"


def test_gradient_is_that_of_autograd(device):
    case = cases.MASKED[0]
    x = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
    mask = case.make_mask("cpu")
    dy = torch.randn(case.shape)
    exact = torch.autograd.grad(cases.reference(x, SCALE, cases.hidden(case, mask)), x, dy.double())
    y = softmax_forward(x.detach().float().to(device), mask.to(device), SCALE)
    dx = softmax_backward(dy.to(device), y, SCALE).cpu()
    torch.testing.assert_close(dx.double(), exact[0].nan_to_num(0.0), rtol=1e-4, atol=1e-6)


SPECIAL_ROWS = {
    "all minus infinity": ([-INFINITY] * 3, [0.0, 0.0, 0.0]),
    "minus infinity is weight 0": ([-INFINITY, 2.0, 2.0], [0.0, 0.5, 0.5]),
    "NaN": ([NAN, 1.0, -INFINITY], [NAN] * 3),
    "plus infinity": ([INFINITY, 1.0, 2.0], [NAN] * 3),
    "one key of many": ([-1e4, 5e4, 0.0], [0.0, 1.0, 0.0]),
    "zeros": ([0.0, -0.0, 0.0], [1 / 3] * 3),
}


@pytest.mark.parametrize("name", SPECIAL_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [3, 8, 2056, 2049, 33000])
def test_special_scores(device, name, dtype, keys):
    """The mask hides the other keys of each row. Their scores are NaN and must have no effect."""
    scores, expected = SPECIAL_ROWS[name]
    x = torch.full((1, 1, 2, keys), NAN, dtype=dtype)
    x[..., :3] = torch.tensor(scores)
    mask = torch.arange(keys).expand(1, 1, 1, keys) >= 3
    rest = NAN if expected[0] != expected[0] else 0.0
    exact = torch.full(x.shape, rest, dtype=torch.float64)
    exact[..., :3] = torch.tensor(expected)
    masked = softmax_forward(x.to(device), mask.to(device), 1.0)
    windowed = softmax_forward(x.to(device), None, 1.0, -1, 0, 2)[:, :, :1]
    torch.testing.assert_close(masked.cpu().double(), exact, rtol=1e-2, atol=0, equal_nan=True)
    assert_bitwise(windowed, masked[:, :, :1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_extreme_finite_scores(device, dtype, scale):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, 0.0, largest], [-largest * scale] * 4], dtype=dtype)
    y = softmax_forward(x.view(1, 1, 2, 4).to(device), None, scale)[0, 0].cpu().float()
    first = [0.5, 0.0, 0.0, 0.5] if scale > 0 else [0.0, 1.0, 0.0, 0.0]
    assert y.tolist() == [first, [0.25] * 4]


def test_denormal_scores_and_zero_scale(device):
    x = torch.full((1, 1, 1, 4), 1e-42)
    assert softmax_forward(x.to(device), None, 1.0).flatten().tolist() == [0.25] * 4
    x = torch.randn(1, 1, 1, 4)
    assert softmax_forward(x.to(device), None, 0.0).flatten().tolist() == [0.25] * 4


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)], ids=str)
def test_empty(device, shape):
    x = torch.empty(shape, device=device)
    mask = torch.zeros(1, 1, 1, shape[3], dtype=torch.bool, device=device)
    assert softmax_forward(x, mask, 1.0).shape == shape
    assert softmax_backward(x, x, 1.0).shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [64, 2056, 33000])
def test_unaligned_memory(device, dtype, keys):
    """Views that begin at the second element of their storage allow no 16-byte access."""
    count = 2 * keys
    x = torch.randn(1 + count).to(dtype).to(device)
    x_view, y_view = (t[1:].view(1, 1, 2, keys) for t in (x, torch.empty_like(x)))
    hidden = torch.rand(1 + keys).lt(0.5).to(device)[1:].view(1, 1, 1, keys)
    y = softmax_forward(x_view, hidden, SCALE)
    exact = cases.reference(x_view.cpu(), SCALE, hidden.cpu())
    assert_close(y, exact)
    y_view.copy_(y)
    dy = torch.randn(y.shape).to(dtype)
    assert_gradient(softmax_backward(dy.to(device), y_view, SCALE), dy, y.cpu())


def test_masks_in_other_layouts(device):
    x = torch.randn(2, 3, 5, 24)
    mask = (torch.rand(24, 5, 3, 2) < 0.5).permute(3, 2, 1, 0)
    y = softmax_forward(x.to(device), mask.to(device), 1.0)
    assert_close(y, cases.reference(x, 1.0, mask))


def test_both_directions_work_in_place(device):
    x = torch.randn(1, 2, 5, 40).to(device)
    dy = torch.randn(1, 2, 5, 40).to(device)
    y = softmax_forward(x, None, SCALE, -1, 0, 0)
    dx = softmax_backward(dy, y, SCALE)
    _C.softmax_forward(x, None, SCALE, -1, 0, 0, x)
    assert_bitwise(x, y)
    _C.softmax_backward(dy, y, SCALE, dy)
    assert_bitwise(dy, dx)


def bad(**changes):
    """Arguments of a valid call of `_C.softmax_forward`, with `changes`."""
    x = torch.zeros(2, 3, 4, 5)
    good = {"x": x, "mask": None, "scale": 1.0, "left": -1, "right": -1, "diagonal": 0}
    return {**good, "y": torch.zeros_like(x), **changes}


ERRORS = {
    "rank": ({"x": torch.zeros(4, 5)}, ValueError, r"x of shape \(batch, heads, queries, keys\)"),
    "dtype": ({"x": torch.zeros(2, 3, 4, 5).double()}, TypeError, "float32, float16 or bfloat16"),
    "strides": ({"x": torch.zeros(2, 3, 5, 4).mT}, ValueError, "expected x to be contiguous"),
    "y dtype": ({"y": torch.zeros(2, 3, 4, 5).half()}, TypeError, "expected float32 for y"),
    "y shape": ({"y": torch.zeros(2, 3, 4, 6)}, ValueError, r"shape \(2, 3, 4, 5\) for y"),
    "mask dtype": ({"mask": torch.zeros(2, 3, 4, 5)}, TypeError, "expected bool for the mask"),
    "mask shape": (
        {"mask": torch.zeros(2, 1, 4, 5, dtype=torch.bool)},
        ValueError,
        r"a mask expanded to shape \(2, 3, 4, 5\), got \(2, 1, 4, 5\)",
    ),
    "mask strides": (
        {"mask": torch.zeros(2, 3, 5, 4, dtype=torch.bool).mT},
        ValueError,
        "keys side by side .* got stride 4",
    ),
    "window": ({"diagonal": 1 << 50}, ValueError, "diagonal below 2\\^48"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    changes, kind, message = ERRORS[name]
    with pytest.raises(kind, match=rf"\[softmax_forward\] .*{message}"):
        _C.softmax_forward(**bad(**changes))


def test_bad_gradient():
    x = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"\[softmax_backward\] expected shape \(2, 3, 4, 5\) for"):
        softmax_backward(x, torch.zeros(2, 3, 4, 6), 1.0)
    with pytest.raises(TypeError, match=r"\[softmax_backward\] expected float32 for y"):
        softmax_backward(x, x.half(), 1.0)


def test_compiles(device):
    x = torch.randn(2, 2, 4, 8, device=device)
    mask = torch.rand(2, 1, 4, 8, device=device) < 0.5

    def both(x, mask):
        y = softmax_forward(x, mask, SCALE, -1, 0, 0)
        return y, softmax_backward(x, y, SCALE)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(x, mask), both(x, mask), strict=True):
        assert_bitwise(ours, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("case", cases.SANITIZE, ids=str)
def test_small_for_the_sanitizer(device, case):
    y, exact = run(case, device, torch.bfloat16)
    assert_close(y, exact)
    dy = torch.randn(case.shape).bfloat16()
    assert_gradient(softmax_backward(dy.to(device), y, SCALE), dy, y.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 2056, 33000])
def test_replays_in_a_graph(keys):
    x = torch.randn(1, 2, 3, keys, device="cuda").bfloat16()
    mask = torch.rand(1, 1, 3, keys, device="cuda") < 0.5
    softmax_backward(x, softmax_forward(x, mask, SCALE), SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax_forward(x, mask, SCALE)
        dx = softmax_backward(x, y, SCALE)
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = softmax_forward(x, mask, SCALE)
    assert_bitwise(y, expected)
    assert_bitwise(dx, softmax_backward(x, expected, SCALE))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.zeros(2, 17, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    x[-1, -1, -1] = torch.linspace(0, 4, 8192)
    y = softmax_forward(x, None, 1.0, -1, 0, 0)
    hide = torch.zeros(1, 1, 1, 8192, dtype=torch.bool)
    assert_close(y[-1:, -1:, -1:], cases.reference(x[-1:, -1:, -1:].cpu(), 1.0, hide))
    dx = softmax_backward(x, y, SCALE)
    assert_gradient(dx[-1, -1, -1:], x[-1, -1, -1:].cpu(), y[-1, -1, -1:].cpu())
