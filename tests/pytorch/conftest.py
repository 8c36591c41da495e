"""Every test of modules begins, and leaves others, without scopes of autocast."""

from collections.abc import Iterator

import pytest

from transformer_engine.pytorch.fp8.autocast import autocast_stack


@pytest.fixture(autouse=True)
def _fresh_scopes() -> Iterator[None]:
    autocast_stack().reset()
    yield
    autocast_stack().reset()
