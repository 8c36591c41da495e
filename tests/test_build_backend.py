"""Decisions of a build in packaging/backend, tested without a build.

These are what a build compiles, which packages it requires, and what it leaves out.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "packaging/backend"))
import cuda_toolkit
from cuda_toolkit import HEADERS, INSTALL, Compiler, Found, LeftOut

ROOT = Path(__file__).parents[1]
BACKEND = ROOT / "packaging/backend"
NVCC = Compiler("/opt/nvcc", (13, 0))
VERSIONS = {"cublas": (13, 0), "cudnn": (9, 14), "cudnn_frontend": (1, 32), "nvrtc": ()}


def put(folder, name, version):
    """Writes a header of some version."""
    folder.mkdir(parents=True, exist_ok=True)
    header = HEADERS[name]
    (folder / header.file).touch()
    if header.versions:
        pairs = zip(header.macros, version, strict=True)
        (folder / header.versions).write_text("".join(f"#define {m} {n}\n" for m, n in pairs))


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An environment with all wheels, in which no other headers are found."""
    usual = cuda_toolkit.places

    def places(compiler, paths):
        return [p for p in usual(compiler, paths) if p.is_relative_to(tmp_path)]

    monkeypatch.setattr(cuda_toolkit, "places", places)
    site = tmp_path / "site-packages"
    put(site / "nvidia/cu13/include", "cublas", VERSIONS["cublas"])
    put(site / "nvidia/cu13/include", "nvrtc", VERSIONS["nvrtc"])
    put(site / "nvidia/cudnn/include", "cudnn", VERSIONS["cudnn"])
    put(site / "include", "cudnn_frontend", VERSIONS["cudnn_frontend"])
    return site


def fake_nvcc(folder, release="13.0", fails=""):
    """Makes a program that answers like nvcc."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--version*) echo "release {release}, V"; exit;;\n'
        f'*--dryrun*) echo "#$ TOP={folder}/bin/.." >&2; exit;; esac\n'
        + (f"echo '{fails}' >&2; exit 1\n" if fails else "")
    )
    path.chmod(0o755)
    return str(path)


def test_a_complete_environment_wants_nothing(wheels):
    found = cuda_toolkit.look(NVCC, paths=[str(wheels)])
    assert found.folders.keys() == HEADERS.keys()
    assert cuda_toolkit.requirements(NVCC, found) == []
    assert cuda_toolkit.left_out(NVCC, found) == []


def test_an_empty_environment_wants_all_wheels(wheels, tmp_path):
    found = cuda_toolkit.look(NVCC, paths=[str(tmp_path / "empty")])
    assert cuda_toolkit.requirements(NVCC, found) == [
        "nvidia-cublas==13.*",
        "nvidia-cudnn-cu13>=9.14,<10",
        "nvidia-cudnn-frontend>=1.32",
        "nvidia-cuda-nvrtc==13.*",
    ]
    older = cuda_toolkit.requirements(Compiler("nvcc", (12, 8)), found)
    assert older[:2] == ["nvidia-cublas-cu12==12.*", "nvidia-cudnn-cu12>=9.14,<10"]
    assert cuda_toolkit.left_out(NVCC, found) == [
        LeftOut("CUDA", "cublasLt.h was not found", INSTALL)
    ]


def test_the_toolkit_comes_first(wheels, tmp_path):
    toolkit = tmp_path / "toolkit"
    put(toolkit, "cublas", (13, 2))
    found = cuda_toolkit.look(Compiler("nvcc", (13, 2), (toolkit,)), paths=[str(wheels)])
    assert found.folders["cublas"] == toolkit
    assert found.folders["cudnn"] == wheels / "nvidia/cudnn/include"


def test_an_old_header_gives_way_to_a_newer_one(wheels, tmp_path):
    system = tmp_path / "system"
    put(system, "cudnn", (9, 5))
    compiler = Compiler("nvcc", (13, 0), (system,))
    found = cuda_toolkit.look(compiler, paths=[str(wheels)])
    assert found.folders["cudnn"] == wheels / "nvidia/cudnn/include"
    shutil.rmtree(wheels / "nvidia/cudnn")
    found = cuda_toolkit.look(compiler, paths=[str(wheels)])
    assert cuda_toolkit.requirements(compiler, found) == ["nvidia-cudnn-cu13>=9.14,<10"]
    reason = f"{system / 'cudnn.h'} is 9.5, older than 9.14"
    assert cuda_toolkit.left_out(compiler, found) == [LeftOut("cuDNN attention", reason, INSTALL)]


def test_cublas_of_another_cuda_is_not_taken(wheels):
    found = cuda_toolkit.look(Compiler("nvcc", (12, 9)), paths=[str(wheels)])
    assert "is of CUDA 13, nvcc of 12" in found.refused["cublas"]


def test_a_named_folder_is_the_only_one(wheels, tmp_path):
    put(tmp_path / "mine", "cudnn", (9, 20))
    paths = [str(wheels)]
    found = cuda_toolkit.look(NVCC, {"cudnn": str(tmp_path / "mine")}, paths)
    assert found.folders["cudnn"] == tmp_path / "mine"
    found = cuda_toolkit.look(NVCC, {"cudnn": str(tmp_path / "nothing")}, paths)
    assert found.refused == {"cudnn": "cudnn.h was not found"}


def test_every_missing_header_is_named(wheels):
    shutil.rmtree(wheels / "include")
    shutil.rmtree(wheels / "nvidia/cudnn")
    found = cuda_toolkit.look(NVCC, paths=[str(wheels)])
    [lacking] = cuda_toolkit.left_out(NVCC, found)
    assert lacking.reason == "cudnn.h was not found; cudnn_frontend.h was not found"
    text = cuda_toolkit.as_cmake(NVCC, found)
    assert f"te_leave_out([==[cuDNN attention]==] [==[{lacking.reason}]==]" in text
    assert f"set(TE_CUBLAS_INCLUDE [==[{wheels}/nvidia/cu13/include]==])" in text
    assert "TE_CUDNN_INCLUDE" not in text


def test_nvcc_is_looked_for_where_people_put_it(tmp_path):
    nvcc = fake_nvcc(tmp_path / "cuda")
    assert cuda_toolkit.find_nvcc({"CUDACXX": nvcc}) == nvcc
    assert cuda_toolkit.find_nvcc({"CUDA_HOME": str(tmp_path / "cuda")}) == nvcc
    assert cuda_toolkit.find_nvcc({"CUDA_PATH": str(tmp_path / "cuda")}) == nvcc
    assert cuda_toolkit.find_nvcc({"PATH": str(Path(nvcc).parent)}) == nvcc
    assert cuda_toolkit.find_nvcc({"CUDACXX": str(tmp_path / "none")}) == ""


def test_nvcc_tells_version_and_toolkit(tmp_path):
    top = tmp_path / "cuda"
    (top / "targets/x86_64-linux/include").mkdir(parents=True)  # the layout of conda
    compiler = cuda_toolkit.examine_nvcc(fake_nvcc(top, "12.9"), {})
    assert (compiler.version, compiler.problem) == ((12, 9), "")
    assert compiler.folders == (top / "include", top / "targets/x86_64-linux/include")


def test_what_is_wrong_with_nvcc(tmp_path):
    none = cuda_toolkit.examine_nvcc("", {})
    assert none.problem.startswith("no nvcc was found")
    assert none.command.startswith("CUDACXX=<nvcc of CUDA 12.8 or newer> TE_CUDA=ON python -m pip")
    old = cuda_toolkit.examine_nvcc(fake_nvcc(tmp_path / "old", "11.8"), {})
    assert old.problem.endswith("is of CUDA 11.8, older than 12.8")
    message = "host_config.h: error: unsupported GNU version! gcc 19"
    nvcc = fake_nvcc(tmp_path / "host", fails=message)
    refused = cuda_toolkit.examine_nvcc(nvcc, {"CUDAHOSTCXX": "g++-19"})
    assert refused.problem == f"{nvcc} compiles nothing here: {message}"
    assert refused.command == f"CUDAHOSTCXX=<an older g++> {INSTALL}"
    broken = cuda_toolkit.examine_nvcc(str(tmp_path / "nowhere"), {})
    assert "does not tell its version" in broken.problem
    for compiler in (none, old, refused, broken):
        assert cuda_toolkit.requirements(compiler, Found()) == []
        [lacking] = cuda_toolkit.left_out(compiler, Found())
        assert lacking == LeftOut("CUDA", compiler.problem, compiler.command)


def test_isolation_hides_nothing(tmp_path):
    """Isolated as pip does it: PYTHONPATH leads to a sitecustomize that clears the path."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    )
    (tmp_path / "overlay").mkdir()
    hidden = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path}/overlay", "PYTHONNOUSERSITE": "1"}
    code = f"import sys; sys.path.append({str(BACKEND)!r}); import cuda_toolkit as c; "
    code += "print(*sys.path, sep=';'); print(*c.installed_paths(), sep=';')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        check=True,
    )
    isolated, found = (line.split(";") for line in done.stdout.splitlines())
    site = next(path for path in sys.path if path.endswith("site-packages"))
    assert site not in isolated
    assert site in found
    assert f"{tmp_path}/overlay" in found[found.index(site) :]  # packages of the build come last


class TestBackend:
    @pytest.fixture(autouse=True)
    def backend(self):
        pytest.importorskip("scikit_build_core")
        self.backend = pytest.importorskip("te_build")

    def test_definitions_of_users(self):
        told = self.backend.definitions(
            {"cmake.define.TE_CUDA": "ON", "skbuild.cmake.define.X": "3", "build.verbose": "1"},
            {"TE_CUDA": "OFF", "CMAKE_ARGS": "-DTE_CUDNN_INCLUDE:PATH='/a b' -GNinja -DX=1"},
        )
        assert told == {"TE_CUDA": "ON", "TE_CUDNN_INCLUDE": "/a b", "X": "3"}

    def test_without_cuda_nothing_is_wanted(self, tmp_path):
        nvcc = fake_nvcc(tmp_path)
        assert self.backend.cuda_requirements(None, {"TE_CUDA": "OFF", "CUDACXX": nvcc}) == []
        assert self.backend.cuda_requirements(None, {"CUDACXX": str(tmp_path / "none")}) == []

    @pytest.mark.parametrize("kind", ["wheel", "editable"])
    def test_hooks_add_what_is_missing(self, wheels, tmp_path, monkeypatch, kind):
        monkeypatch.setenv("CUDACXX", fake_nvcc(tmp_path / "cuda"))
        monkeypatch.delenv("TE_CUDA", raising=False)
        monkeypatch.chdir(ROOT)
        shutil.rmtree(wheels / "include")
        monkeypatch.setattr(cuda_toolkit, "installed_paths", lambda: [str(wheels)])
        ask = getattr(self.backend, f"get_requires_for_build_{kind}")
        assert [one for one in ask() if one.startswith("nvidia")] == ["nvidia-cudnn-frontend>=1.32"]
        named = {"cmake.define.TE_CUDNN_FRONTEND_INCLUDE": str(tmp_path / "mine")}
        put(tmp_path / "mine", "cudnn_frontend", (1, 40))
        assert [one for one in ask(named) if one.startswith("nvidia")] == []
        monkeypatch.setenv("TE_CUDA", "OFF")
        assert [one for one in ask() if one.startswith("nvidia")] == []


def test_pyproject_names_the_backend():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'build-backend = "te_build"' in text
    assert 'backend-path = ["packaging/backend"]' in text


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["9.0", "9.0"], "90a-real"),
        (["9.0", "7.5"], "90a-real"),
        (["7.5"], "80-real;"),
        ([], "80-"),
    ],
)
def test_gpus_of_this_machine_that_are_supported(tmp_path, gpus, expected):
    program, script = tmp_path / "nvidia-smi", tmp_path / "archs.cmake"
    program.write_text("#!/bin/sh\n" + "".join(f"echo {one}\n" for one in gpus))
    program.chmod(0o755)
    script.write_text(
        f"include({ROOT}/cmake/CudaArchitectures.cmake)\nset(TE_CUDA_ARCHS AUTO)\n"
        'te_cuda_archs(found)\nmessage("got ${found}")\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["cmake", "-P", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"got {expected}" in done.stderr
    assert ("older than Ampere" in done.stdout) is ("7.5" in gpus)
    assert "75" not in done.stderr


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
def test_a_missing_compiler_is_told_with_the_command_that_brings_it(tmp_path):
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DTE_PYTHON=OFF", "-DTE_CUDA=OFF"]
    environment = {**os.environ, "CXX": str(tmp_path / "g++")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "A C++ compiler is missing" in done.stderr
    assert "apt-get install g++" in done.stderr
