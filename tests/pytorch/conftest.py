"""Every test of modules begins, and leaves others, without scopes of autocast and streams."""

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
