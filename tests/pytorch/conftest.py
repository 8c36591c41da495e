"""Each test starts outside of all autocasts, and must leave the default CUDA stream current."""

from collections.abc import Iterator

import pytest
import torch

from transformer_engine.pytorch.fp8.autocast_stack import reset_autocast


@pytest.fixture(autouse=True)
def _fresh_scopes() -> Iterator[None]:
    reset_autocast()
    yield
    reset_autocast()
    if torch.cuda.is_initialized():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Torch's default dtype during the test: each one except fp32."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)
