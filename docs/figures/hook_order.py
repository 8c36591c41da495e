"""Draws docs/features/hook_order.md: which calls a layer makes, in which order.

    python docs/figures/hook_order.py     writes hook_order_light.svg and hook_order_dark.svg

`FORWARD` and `BACKWARD` are the order that a layer in FP8 really has: tests/test_documents.py
records it and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

FORWARD = (
    ("inspect_tensor", "activation", ""),
    ("cast", "activation", "fprop"),
    ("inspect_tensor_postquantize", "activation", "fprop"),
    ("cast", "activation", "wgrad"),
    ("inspect_tensor_postquantize", "activation", "wgrad"),
    ("inspect_tensor", "weight", ""),
    ("cast", "weight", "fprop"),
    ("inspect_tensor_postquantize", "weight", "fprop"),
    ("cast", "weight", "dgrad"),
    ("inspect_tensor_postquantize", "weight", "dgrad"),
    ("gemm", "fprop", ""),
    ("inspect_tensor", "output", ""),
)
BACKWARD = (
    ("inspect_tensor", "gradient", ""),
    ("cast", "gradient", "dgrad"),
    ("inspect_tensor_postquantize", "gradient", "dgrad"),
    ("cast", "gradient", "wgrad"),
    ("inspect_tensor_postquantize", "gradient", "wgrad"),
    ("gemm", "dgrad", ""),
    ("inspect_tensor", "dgrad", ""),
    ("gemm", "wgrad", ""),
    ("inspect_tensor", "wgrad", ""),
)


class Palette(NamedTuple):
    """Colours of a scheme."""

    text: str
    faint: str
    card: str
    tensor: str
    look: str
    change: str
    gemm: str
    on_gemm: str


LIGHT = Palette(
    text="#1c2733",
    faint="#6b7885",
    card="#f4f6f8",
    tensor="#dde4ea",
    look="#cfe8e4",
    change="#ffe0cc",
    gemm="#00796b",
    on_gemm="#ffffff",
)
DARK = Palette(
    text="#e6edf3",
    faint="#93a1b0",
    card="#232a36",
    tensor="#364152",
    look="#1d4a46",
    change="#5c3a26",
    gemm="#4db6ac",
    on_gemm="#10202a",
)
FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"
WIDTH, ROW = 1060, 46


class Drawing:
    """Collects shapes, top to bottom."""

    def __init__(self, palette: Palette) -> None:
        self.palette = palette
        self.shapes: list[str] = []
        self.y = 16

    def text(self, x: int, y: int, words: str, size: int = 13, **style: str) -> None:
        """Words whose middle is at `y`."""
        fill = style.pop("fill", self.palette.text)
        extra = " ".join(f"{key.replace('_', '-')}='{value}'" for key, value in style.items())
        self.shapes.append(
            f"<text x='{x}' y='{y + size * 0.35:.0f}' font-size='{size}' fill='{fill}' {FONT}"
            f" {extra}>{words}</text>"
        )

    def box(self, x: int, width: int, colour: str, words: str, **style: str) -> None:
        """A rounded box on the current row."""
        self.shapes.append(
            f"<rect x='{x}' y='{self.y}' width='{width}' height='32' rx='7' fill='{colour}'/>"
        )
        self.text(x + width // 2, self.y + 16, words, text_anchor="middle", **style)

    def arrow(self, start: int, end: int) -> None:
        """From one box to the next."""
        y = self.y + 16
        self.shapes.append(
            f"<path d='M{start} {y}H{end - 5}m-5 -4l6 4l-6 4' fill='none'"
            f" stroke='{self.palette.faint}' stroke-width='1.4'/>"
        )

    def card(self, height: int) -> None:
        """A background for what comes next."""
        self.shapes.append(
            f"<rect x='8' y='{self.y}' width='{WIDTH - 16}' height='{height}' rx='12'"
            f" fill='{self.palette.card}'/>"
        )


def draw(palette: Palette) -> str:
    """The figure as SVG."""
    drawing = Drawing(palette)
    _routing(drawing)
    number = _part(drawing, "forward", FORWARD, 1)
    _part(drawing, "backward", BACKWARD, number)
    height = drawing.y
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>"
        "<title>The calls of a layer to features, in their order</title>"
        + "".join(drawing.shapes)
        + "</svg>\n"
    )


def _routing(drawing: Drawing) -> None:
    palette = drawing.palette
    drawing.card(100)
    drawing.y += 12
    drawing.text(28, drawing.y + 12, "routing calls", 15, font_weight="600")
    drawing.text(
        142,
        drawing.y + 13,
        "at the start of a forward whose answers have run out; all no: the layer keeps its fusions",
        12,
        fill=palette.faint,
    )
    drawing.y += 38
    x = 28
    for words, fill, width in (
        ("inspect_tensor_enabled", palette.look, 190),
        ("inspect_tensor_postquantize_enabled", palette.look, 280),
        ("modify_tensor_enabled", palette.change, 190),
        ("fp8_gemm_enabled", palette.change, 160),
    ):
        drawing.box(x, width, fill, words)
        x += width + 14
    drawing.y += 62


def _part(drawing: Drawing, name: str, calls: tuple[tuple[str, str, str], ...], number: int) -> int:
    """One direction: a row for each tensor that is cast, one for each GEMM with its result."""
    rows: list[list[tuple[str, str, str]]] = []
    for call in calls:
        starts = call[0] == "gemm" or (call[0] == "inspect_tensor" and call[1] in _OPERANDS)
        if starts:
            rows.append([])
        rows[-1].append(call)
    height = 46 + sum(ROW * (2 if len(row) > 2 else 1) for row in rows)
    drawing.card(height)
    drawing.y += 12
    drawing.text(28, drawing.y + 12, name, 15, font_weight="600")
    drawing.y += 30
    for row in rows:
        number = (
            _cast_row(drawing, row, number) if len(row) > 2 else _gemm_row(drawing, row, number)
        )
    drawing.y += 20
    return number


_OPERANDS = ("activation", "weight", "gradient")


def _cast_row(drawing: Drawing, row: list[tuple[str, str, str]], number: int) -> int:
    palette, tensor = drawing.palette, row[0][1]
    drawing.box(28, 104, palette.tensor, tensor, font_weight="600")
    drawing.arrow(134, 160)
    drawing.box(160, 160, palette.look, f"{number}  inspect_tensor")
    number += 1
    for i in (1, 3):
        gemm = row[i][2]
        drawing.arrow(322, 352)
        drawing.box(352, 284, palette.change, f"{number}  modify_tensor, or the cast, for {gemm}")
        drawing.arrow(638, 664)
        drawing.box(664, 256, palette.look, f"{number + 1}  inspect_tensor_postquantize")
        drawing.arrow(922, 946)
        drawing.text(954, drawing.y + 16, f"to {gemm}", 13, fill=palette.faint)
        drawing.y += ROW
        number += 2
    return number


def _gemm_row(drawing: Drawing, row: list[tuple[str, str, str]], number: int) -> int:
    palette, gemm, result = drawing.palette, row[0][1], row[1][1]
    drawing.box(28, 104, palette.gemm, gemm, font_weight="700", fill=palette.on_gemm)
    drawing.arrow(134, 160)
    drawing.box(160, 104, palette.tensor, result, font_weight="600")
    drawing.arrow(266, 292)
    drawing.box(292, 200, palette.change, f"{number}  modify_tensor, if wanted")
    drawing.arrow(494, 520)
    drawing.box(520, 160, palette.look, f"{number + 1}  inspect_tensor")
    drawing.y += ROW
    return number + 2


def main() -> None:
    """Write both files."""
    folder = Path(__file__).parent
    for name, palette in (("light", LIGHT), ("dark", DARK)):
        (folder / f"hook_order_{name}.svg").write_text(draw(palette))


if __name__ == "__main__":
    sys.exit(main())
