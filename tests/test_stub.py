"""The stub file for mypy has the signatures of the built native module."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import make_stub

from transformer_engine import _C


def test_is_that_of_the_module():
    written, told = make_stub.STUB.read_text(), make_stub.stub_of(_C)
    assert written == told, "run tools/make_stub.py"


def test_signatures():
    text = (
        'f(x: typing.Annotated[collections.abc.Sequence[typing.SupportsInt], "FixedSize(3)"],'
        " y: typing.SupportsFloat | typing.SupportsIndex | None = None) -> tuple[int, bool]"
    )
    assert make_stub.definition(text) == (
        "def f(x: Sequence[int], y: float | None = None) -> tuple[int, bool]: ..."
    )
    long = make_stub.definition(f"f(self: C, {'x' * 60}: int, y: dict[str, int] = 1) -> None", "  ")
    inner = f"      self, {'x' * 60}: int, y: dict[str, int] = 1"
    assert long.splitlines() == ["  def f(", inner, "  ) -> None: ..."]
    longer = make_stub.definition(f"f(self: C, {'x' * 90}: int) -> None")
    assert longer.splitlines() == ["def f(", "    self,", f"    {'x' * 90}: int,", ") -> None: ..."]
