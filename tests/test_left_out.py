"""Messages about parts that a build lacks: at import if a GPU is visible, by doctor always."""

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from transformer_engine import _C, _build, doctor

INSTALL = "TE_CUDA=ON python -m pip install --force-reinstall --no-deps ."
LACKS = {
    "cuda": ("CUDA", "cublasLt.h was not found", INSTALL),
    "cudnn": ("cuDNN attention", "cudnn.h is 9.5, older than 9.14", INSTALL),
    "nvcc": ("CUDA", "no nvcc was found", f"CUDACXX=<nvcc> {INSTALL}"),
}


@pytest.fixture(params=LACKS)
def lack(request, monkeypatch):
    row = LACKS[request.param]
    monkeypatch.setattr(_C, "left_out", lambda: [row])
    monkeypatch.setattr(_build, "source_folder", lambda: ("", False))
    return _build.LeftOut(row[0], row[1], f"in the sources: {row[2]}")


def test_the_record_agrees_with_the_module():
    parts = [part for part, _, _ in _C.left_out()]
    assert ("CUDA" in parts) is not _C.built_with_cuda()


@pytest.mark.parametrize(("facts", "option"), [({}, ""), ({"editable": True}, "-e ")])
def test_commands_install_as_before(monkeypatch, tmp_path, facts, option):
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    record = json.dumps({"url": folder.as_uri(), "dir_info": facts})
    found = SimpleNamespace(read_text=lambda name: record if name == "direct_url.json" else None)
    monkeypatch.setattr(_build, "distribution", lambda name: found)
    monkeypatch.setattr(_C, "left_out", lambda: [LACKS["cuda"]])
    (lack,) = _build.left_out()
    assert lack.command == f"{INSTALL.removesuffix('.')}{option}'{folder}'"


def test_import_warns_where_a_gpu_is_visible(lack):
    with pytest.warns(UserWarning) as told:
        _build.warn_of_left_out(lambda: 1)
    assert [str(one.message) for one in told] == [
        f"[transformer_engine] this machine has a GPU, but the build lacks {lack.part}: "
        f"{lack.reason}. To have it: {lack.command}"
    ]


def test_import_is_silent_where_nothing_is_lost(lack, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _build.warn_of_left_out(lambda: 0)
        monkeypatch.setattr(_C, "left_out", list)
        _build.warn_of_left_out(lambda: pytest.fail("nothing was left out: GPUs need no counting"))


def test_import_itself_warns():
    """The real import, in a process that sees a GPU."""
    torch = pytest.importorskip("torch")
    assert torch.cuda.device_count.__module__
    code = (
        "import torch; torch.cuda.device_count = lambda: 1\n"
        "from transformer_engine import _C; _C.left_out = lambda: [('CUDA', 'why', 'how')]\n"
        "import transformer_engine.pytorch"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "this machine has a GPU, but the build lacks CUDA: why. To have it: " in done.stderr


class Machine(doctor.Machine):
    def __init__(self, cuda, gpu):
        super().__init__()
        self._found["torch"] = SimpleNamespace(
            version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: gpu)
        )


@pytest.mark.parametrize(
    ("cuda", "gpu", "status", "told"),
    [
        ("13.0", True, doctor.MISSING, "torch sees a GPU"),
        ("13.0", False, doctor.ABSENT, "torch is built for CUDA 13.0"),
        (None, False, doctor.ABSENT, "for a GPU, in the sources: "),
    ],
)
def test_doctor_always_tells(lack, cuda, gpu, status, told):
    [found] = doctor._left_out(Machine(cuda, gpu))
    assert (found.name, found.status) == (lack.part, status)
    assert found.value.startswith(f"left out of this build: {lack.reason}; {told}")
    assert found.fix == (lack.command if cuda else "")
    last = doctor.as_text([found]).splitlines()[-1]
    if gpu:
        assert last == f"missing: {lack.part}"
    elif cuda:
        assert last == f"everything that is needed is here; worth doing: {lack.part}"
    else:
        assert last == "everything that is needed is here"


def recorded(folder, monkeypatch, url):
    """Returns the advice for an installation that pip made from `url`."""
    text = None if url is None else json.dumps({"url": url, "dir_info": {}})
    found = SimpleNamespace(read_text={"direct_url.json": text}.__getitem__)
    monkeypatch.setattr(_build, "distribution", lambda name: found)
    monkeypatch.setattr(_C, "left_out", lambda: [LACKS["cuda"]])
    [one] = _build.left_out()
    return one.command


def test_the_command_names_the_sources_that_pip_knows(tmp_path, monkeypatch):
    folder = tmp_path / "my sources"
    folder.mkdir()
    url = folder.as_uri()
    assert recorded(folder, monkeypatch, url) == f"in the sources: {INSTALL}"  # the folder has none
    (folder / "pyproject.toml").touch()
    assert recorded(folder, monkeypatch, url) == f"{INSTALL.removesuffix('.')}'{folder}'"
    for other in (None, "https://example.org/transformer_engine.whl"):
        assert recorded(folder, monkeypatch, other) == f"in the sources: {INSTALL}"
