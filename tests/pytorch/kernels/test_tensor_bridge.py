"""How C++ sees tensors: fields of a `TensorView`, and kinds of tensors that are refused."""

import sys
import threading

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine import _C
from transformer_engine.pytorch.kernels.amax import amax


class PlainSubclass(torch.Tensor):
    """Shares the storage of the tensor it was made from."""


class WrapperSubclass(torch.Tensor):
    """Has a shape and no storage, like a quantized tensor."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(2, 3)


def fake_tensor():
    with FakeTensorMode():
        return torch.ones(2, 3)


def check(tensor, device="cpu"):
    seen = _C.describe(tensor)
    assert seen["data"] == tensor.data_ptr()
    assert seen["sizes"] == tuple(tensor.shape)
    assert seen["strides"] == tensor.stride()
    assert seen["contiguous"] == tensor.is_contiguous()
    assert seen["device"] == device
    return seen


VIEWABLE = {
    "matrix": lambda: torch.ones(2, 3),
    "0-dim": lambda: torch.tensor(3.0),
    "zero size": lambda: torch.empty(0, 3),
    "zero size in the middle": lambda: torch.empty(2, 0, 3),
    "8 dimensions": lambda: torch.ones([1, 2] * 4),
    "offset": lambda: torch.arange(12)[5:],
    "transposed": lambda: torch.ones(2, 3).T,
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "every second column": lambda: torch.ones(4, 6)[:, ::2],
    "size 1 with an odd stride": lambda: torch.ones(4, 6)[:1],
    "leaf that requires grad": lambda: torch.ones(2, requires_grad=True),
    "result with a graph": lambda: torch.ones(2, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "plain subclass": lambda: torch.ones(2, 3).as_subclass(PlainSubclass),
    "inference tensor": inference_tensor,
    "copy-on-write clone": lambda: torch.ones(5)._lazy_clone(),
}


@pytest.mark.parametrize("make", VIEWABLE.values(), ids=VIEWABLE.keys())
def test_is_seen_as_torch_sees_it(make):
    check(make())


DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype):
    assert check(torch.zeros(2, 3).to(dtype))["dtype"] == DTYPES[dtype]


STORAGE = r"\[tensor\] expected a tensor with storage, got a \w+ of shape \(.*\) without data"
DENSE = r"\[tensor\] expected a (dense )?tensor on cpu or cuda, got "
DTYPE = r"\[tensor\] expected float32, .* or bool, got "

REFUSED = {
    "fake": (fake_tensor, TypeError, STORAGE),
    "wrapper subclass": (lambda: WrapperSubclass(2, 3), TypeError, STORAGE),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(2)), TypeError, STORAGE),
    "meta": (lambda: torch.empty(2, device="meta"), TypeError, DENSE),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, DENSE),
    "compressed sparse": (lambda: torch.eye(3).to_sparse_csr(), TypeError, DENSE),
    "another layout": (lambda: torch.ones(2).to_mkldnn(), TypeError, DENSE),
    "int8": (lambda: torch.ones(2, dtype=torch.int8), TypeError, DTYPE),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64).conj(), TypeError, DTYPE),
    "another float8": (lambda: torch.ones(2).to(torch.float8_e4m3fnuz), TypeError, DTYPE),
    "9 dimensions": (lambda: torch.ones([1] * 9), ValueError, "at most 8 dimensions, got 9"),
    "None": (lambda: None, TypeError, "incompatible function arguments"),
    "NumPy": (lambda: numpy.ones(3), TypeError, "incompatible function arguments"),
    "list": (lambda: [1.0], TypeError, "incompatible function arguments"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")  # once
@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        _C.describe(make())


def test_batched_by_vmap_is_refused():
    def body(x):
        with pytest.raises(TypeError, match=DENSE):
            _C.describe(x)
        return x

    torch.vmap(body)(torch.ones(2, 3))


def test_negative_bit_is_not_seen():
    """C++ reads the memory without the negation, so callers must call `resolve_neg` before."""
    assert torch._neg_view(torch.ones(2)).is_neg()
    check(torch._neg_view(torch.ones(2)))


def test_an_absent_tensor_is_an_error_of_the_op():
    with pytest.raises(ValueError, match=r"\[amax\] expected a tensor for x, got none"):
        _C.amax(None, None, None, 5, False, 0.0)


def test_a_refused_type_does_not_spoil_the_next_tensor():
    """C++ caches what it knows about each type."""
    for _ in range(2):
        check(torch.ones(2))
        with pytest.raises(TypeError):
            _C.describe(WrapperSubclass(2))
        with pytest.raises(TypeError):
            _C.describe(numpy.ones(2))
        check(torch.nn.Parameter(torch.ones(2)))


def test_from_another_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(check(torch.ones(2, 3))))
    thread.start()
    thread.join()
    assert seen[0]["sizes"] == (2, 3)


def test_leaves_no_reference_behind():
    x = torch.ones(2, 3)
    before = sys.getrefcount(x)
    _C.describe(x)
    assert sys.getrefcount(x) == before


@pytest.mark.gpu
def test_cuda_tensor_and_its_stream():
    x = torch.ones(4, 6, device="cuda")
    assert check(x.T, "cuda:0")["stream"] == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert check(x, "cuda:0")["stream"] == side.cuda_stream
    assert check(x, "cuda:0")["stream"] == torch.cuda.current_stream().cuda_stream


@pytest.mark.gpu
def test_pinned_memory_counts_as_cpu():
    check(torch.ones(4).pin_memory())


@pytest.mark.gpu
def test_launches_on_the_current_stream():
    x = torch.full((1024,), 3.0, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**7)  # on another stream amax would read the old values
        x.fill_(5.0)
        result = amax(x)
    side.synchronize()
    assert result.item() == 5.0


@pytest.mark.multi_gpu
def test_launches_on_the_device_of_the_tensor():
    x = torch.full((1024,), 3.0, device="cuda:1")
    with torch.cuda.device(0):
        result = amax(x)
        assert torch.cuda.current_device() == 0
    assert check(result, "cuda:1")["stream"] == torch.cuda.current_stream(1).cuda_stream
    assert result.item() == 3.0


@pytest.mark.gpu
def test_tensors_of_two_devices():
    x, scales = torch.ones(4, device="cuda"), torch.ones(2)
    with pytest.raises(ValueError, match=r"\[amax\] expected scales on cuda:0, got it on cpu"):
        _C.amax(x, None, scales, 5, False, 0.0)
