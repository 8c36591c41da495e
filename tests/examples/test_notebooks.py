"""Runs each notebook from top to bottom, in a process that looks like a notebook's kernel."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
GUESSING = math.log(16)
# A stand-in for Jupyter and its kernel, which are thirty packages. The value of a cell's last
# expression is shown, and so is an argument of `display`.
KERNEL = """
import ast, json, sys
from types import ModuleType, SimpleNamespace

shell = SimpleNamespace(kernel=object())
shown = lambda value: print(f"SHOWN {value}")
ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
ipython.get_ipython = lambda: shell
display.HTML, display.display = str, shown
sys.modules.update({"IPython": ipython, "IPython.display": display})

names = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    print(f"CELL {number}")
    exec(compile(tree, f"cell {number}", "exec"), names)
    if last:
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        if value is not None:
            shown(repr(value))
"""


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(cells: list[str], folder: Path) -> list[str]:
    """Returns the output of each cell, printed or shown."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [part.partition("\n")[2] for part in done.stdout.split("CELL ")[1:]]


def test_inspect_training_finds_what_fp8_loses(tmp_path: Path) -> None:
    cells = code_cells(NOTEBOOKS / "inspect_training.ipynb")
    cells.append("(logs / 'report.html').read_text().count('<html'), debug_api.DEBUG_MANAGER")
    cells.append("results")
    outputs = run(cells, tmp_path)
    shown = next(output for output in outputs if "<table" in output)
    assert "of the gradient becomes zero in model.head" in shown
    assert "gemms: [dgrad, wgrad]" in shown  # as the next cell does
    assert any("A debug session was running" in output for output in outputs)
    assert outputs[-2] == "SHOWN (1, None)\n"
    results = eval(outputs[-1].removeprefix("SHOWN "))
    assert all(main < 1.5 for main, _ in results.values())
    learnt = {run: auxiliary < GUESSING - 0.1 for run, (_, auxiliary) in results.items()}
    assert learnt == {"fp32": True, "fp8": False, "fp8, head changed": True}


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
