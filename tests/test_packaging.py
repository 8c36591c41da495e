"""Metadata that other programs read from the installed distribution, and package versions."""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

import nvdlfw_inspect

ROOT = Path(__file__).parents[1]


def test_inspect_imports_without_torch() -> None:
    code = "import sys, nvdlfw_inspect._engine; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("package", "extension"), [("nvdlfw_inspect", "_engine"), ("transformer_engine", "_C")]
)
def test_a_source_tree_says_what_it_lacks(tmp_path: Path, package: str, extension: str) -> None:
    (tmp_path / package).mkdir()
    source = ROOT / package / "__init__.py"
    (tmp_path / package / "__init__.py").write_text(source.read_text())
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {package} import {extension}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"expected the extension module {extension} in {tmp_path}" in done.stderr
    assert "install it (pip install .) and start Python in another folder" in done.stderr


def test_inspect_carries_its_own_yaml_cpp() -> None:
    """The wheel must import without an installed libyaml-cpp: it contains or links the library."""
    if not any("_engine" in str(file) for file in metadata_files()):
        pytest.skip("built in place: no distribution is installed")
    from nvdlfw_inspect import _engine  # noqa: PLC0415 - loads the library that is looked for

    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = [Path(path) for path in mapped if "libyaml-cpp" in path]
    assert {path.parent for path in libraries} <= {Path(_engine.__file__).parent}


def metadata_files() -> list[metadata.PackagePath]:
    try:
        return metadata.files("transformer-engine") or []
    except metadata.PackageNotFoundError:
        return []


def test_metadata_wheel_has_the_version_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    text = (ROOT / "packaging/nvdlfw-inspect/pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert project["version"] == nvdlfw_inspect.__version__
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert project["dependencies"] == [f"transformer-engine=={own}"]
    assert Version(nvdlfw_inspect.__version__) >= Version("0.2.2")


def test_distribution_version_passes_the_gates_of_clients() -> None:
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        pytest.skip("built in place: no distribution is installed")
    assert Version(version) >= Version("2.9.0")
    assert metadata.version("transformer_engine") == version


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_has_one_recipe_for_each_target() -> None:
    done = subprocess.run(
        ["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_import_leaves_compilers_and_dtensors_to_those_who_use_them():
    """The import of these modules takes a second and a half."""
    heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"]
    code = (
        "import sys, torch; before = set(sys.modules); import transformer_engine.pytorch;"
        f" sys.exit(' '.join({{*{heavy}}} & sys.modules.keys() - before) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
