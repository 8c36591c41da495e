"""Makes the metadata of the distribution available to other libraries."""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Adds a distribution if the package is built in place, since libraries look it up by name."""
    try:
        metadata.version("transformer-engine")
        yield
        return
    except metadata.PackageNotFoundError:
        pass
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    site = tmp_path_factory.mktemp("site")
    folder = site / f"transformer_engine-{version}.dist-info"
    folder.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: transformer-engine", f"Version: {version}", "")
    (folder / "METADATA").write_text("\n".join(lines))
    sys.path.append(str(site))
    yield
    sys.path.remove(str(site))
