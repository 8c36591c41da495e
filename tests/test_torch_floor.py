"""The oldest torch version: stated alike everywhere, and named in errors for older versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_engine import _torch_floor

ROOT = Path(__file__).parents[1]


def test_pyproject_and_readme_say_the_same() -> None:
    oldest, newest = map(_torch_floor.as_text, (_torch_floor.OLDEST, _torch_floor.NEWEST_TRIED))
    (required,) = re.findall(
        r'^dependencies = \["torch>=([\d.]+)"\]', _text("pyproject.toml"), re.M
    )
    (row,) = re.findall(r"^\| torch \| (.*) \|$", _text("README.md"), re.M)
    assert required == oldest
    assert re.findall(r"\d+\.\d+", row) == [oldest, oldest, newest]


def _text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.4.1+cu121", False),
        ("2.9.1", False),
        ("2.10.0", False),
        ("2.11.0", True),
        ("3.0.0a0+git1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, fits: bool) -> None:
    assert (_torch_floor.complaint(version) == "") == fits


def test_an_older_torch_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.4.1+cpu'\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import transformer_engine.pytorch"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    *_, said = done.stderr.splitlines()
    assert said.startswith("ImportError: [transformer_engine] expected torch 2.11 or newer")
    assert "got 2.4.1+cpu: python -m pip install --upgrade 'torch>=2.11'" in said
