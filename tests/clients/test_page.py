"""Runs the listings of docs/how-to/use_other_libraries.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

for client in ("accelerate", "peft"):
    pytest.importorskip(client)
from accelerate.state import AcceleratorState, GradientState

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use_other_libraries.md"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_listings_run() -> None:
    names: dict[str, object] = {}
    listings = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(listings) == 2
    for listing in listings:
        exec(compile(listing, PAGE.name, "exec"), names)
