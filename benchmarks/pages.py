"""Writes results into pages: text between marks, and figures for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_GRAY = "#808080"  # visible on light and dark pages
_PARTS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def put_into(page: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- name -->` and `<!-- end of name -->`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}")


@contextmanager
def figure(target: Path, *grid: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """`pyplot.subplots` as a context manager, which writes the figure to an SVG file at its end."""
    import matplotlib  # noqa: PLC0415  tables need no matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    style = {"svg.hashsalt": target.name, "font.size": 8}  # the same results give the same file
    with pyplot.rc_context({**style, **dict.fromkeys(_PARTS, _GRAY)}):
        made, axes = pyplot.subplots(*grid, layout="constrained", **options)
        yield made, axes
        made.savefig(target, metadata={"Date": None}, transparent=True)
        pyplot.close(made)
