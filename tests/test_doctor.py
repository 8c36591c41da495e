"""python -m transformer_engine.doctor: its findings, and that it survives broken installations."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import transformer_engine
from transformer_engine import _env, _libraries, doctor

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]


def by_name(findings):
    return {one.name: one for one in findings}


def run(arguments=(), folder=None):
    """Runs the command in its own process; modules in `folder` come first."""
    path = os.pathsep.join(filter(None, [folder and str(folder), *sys.path[1:]]))
    return subprocess.run(
        [sys.executable, "-m", "transformer_engine.doctor", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_healthy(capsys):
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for section in ("versions", "devices", "native", "libraries", "attention"):
        assert f"\n{section}\n" in f"\n{text}"
    assert f"{torch.__version__}" in text
    assert "forward and backward run" in text
    assert "\neverything that is needed is here" in text


def test_json(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    found = {one["name"]: one for one in report["findings"]}
    others = found["plain on cpu"].pop("details")
    assert {"cudnn", "flash2", "flash3", "flash4"} <= others.keys()
    assert found["plain on cpu"] == {
        "section": "attention",
        "name": "plain on cpu",
        "status": "ok",
        "value": "sdpa",
        "path": "",
        "fix": "",
    }
    assert "no ALiBi" in found["ALiBi on cpu"]["details"]["sdpa"]
    assert found["transformer_engine._C"]["value"].startswith("backends: CPU")


TORCHES = {
    "absent": ("raise ModuleNotFoundError(\"No module named 'torch'\")", "install torch"),
    "broken": ("raise OSError('libtorch_cpu.so: cannot open')", "install --force-reinstall torch"),
    "leaving": ("raise SystemExit(3)", "install --force-reinstall torch"),
    "empty": ("", "install --force-reinstall torch"),
}


@pytest.mark.parametrize("kind", TORCHES)
def test_without_torch(tmp_path, kind):
    code, fix = TORCHES[kind]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(code + "\n")
    done = run(["--json"], tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["Python"]["status"] == "ok"
    assert found["torch"]["status"] == "missing"
    assert found["torch"]["fix"].endswith(fix)
    assert found["nvdlfw_inspect._engine"]["status"] == "ok"


def test_old_torch():
    found = doctor._torch_version(SimpleNamespace(__version__="2.1.0+cpu", __file__=None))
    assert (found.status, found.value) == (doctor.MISSING, "2.1.0+cpu, older than 2.11")
    assert found.fix == "python -m pip install --upgrade torch"


def test_text_of_a_broken_machine(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('undefined symbol: x')\n")
    done = run((), tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "MISSING  torch" in done.stdout
    assert "torch: python -m pip install --force-reinstall torch" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("missing: torch")


@pytest.mark.parametrize("name", ["transformer_engine._C", "nvdlfw_inspect._engine"])
def test_broken_extension(monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert f"MISSING  {name}" in text
    assert f"  {name}: " in text.partition("what to do")[2]
    assert "ok       plain on cpu" in text


def test_sources_that_hide_what_is_installed(monkeypatch, tmp_path):
    """The situation after `pip install .`, in the folder of the sources."""
    metadata = tmp_path / "transformer_engine-2.20.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "transformer_engine._C", None)
    sources = doctor.Path(doctor.__file__).parents[1]
    for installed in (False, True):
        if installed:
            (tmp_path / "transformer_engine").mkdir()
            (tmp_path / "transformer_engine" / "doctor.py").touch()
        fix = by_name(doctor.native(doctor.Machine()))["transformer_engine._C"].fix
        hides = f"run from another folder: {sources} hides the package installed in"
        assert (fix == f"{hides} {tmp_path}") is installed


def test_missing_library_of_the_engine(monkeypatch):
    load = doctor.importlib.import_module

    def refuse(name):
        if name == "nvdlfw_inspect._engine":
            raise ImportError("libyaml-cpp.so.0.7: cannot open shared object file")
        return load(name)

    monkeypatch.setattr(doctor.importlib, "import_module", refuse)
    found = by_name(doctor.native(doctor.Machine()))["nvdlfw_inspect._engine"]
    assert found.status == doctor.MISSING
    assert found.fix.startswith("apt-get install libyaml-cpp-dev; ")


class WithGPU(doctor.Machine):
    cuda = True


def test_a_gpu_needs_cublaslt(monkeypatch):
    machine = WithGPU()
    monkeypatch.setattr(machine.load("transformer_engine._C"), "built_with_cuda", lambda: True)

    def absent(library):
        raise OSError("no such file")

    monkeypatch.setattr(_libraries, "find", absent)
    found = by_name(doctor.libraries(machine))
    assert found["cuBLASLt"].status == doctor.MISSING
    assert found["cuBLASLt"].fix.endswith("pip install nvidia-cublas")
    assert found["cuDNN"].status == found["NCCL"].status == doctor.ABSENT


def test_a_layer_that_does_not_run(monkeypatch):
    machine = doctor.Machine()

    def fail(*args, **kwargs):
        raise RuntimeError("[libcublasLt.so.13] expected torch to have loaded it")

    monkeypatch.setattr(machine.load("transformer_engine.pytorch"), "Linear", fail)
    found = by_name(doctor.native(machine))["FP8 Linear on cpu"]
    assert found.status == doctor.MISSING
    assert "RuntimeError: [libcublasLt.so.13] expected" in found.value
    assert "nvidia-cublas" in found.fix


def test_no_attention_backend_left(monkeypatch):
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    found = by_name(doctor.attention(doctor.Machine()))["plain on cpu"]
    assert (found.status, found.fix) == (doctor.MISSING, "unset NVTE_UNFUSED_ATTN")
    assert set(found.details) >= {"sdpa", "unfused"}


def test_surroundings(monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_TORCH_COMPILE", "1")
    rivals = {
        "transformer_engine": ["transformer_engine_cu13", "transformer_engine"],
        "nvdlfw_inspect": ["transformer-engine", "nvdlfw-inspect"],
    }
    monkeypatch.setattr(doctor, "_distribution", lambda name: "2.9.0")
    monkeypatch.setattr(doctor.importlib.metadata, "packages_distributions", lambda: rivals)
    found = by_name(doctor.surroundings(doctor.Machine()))
    assert (found["NVTE_FUSED_ATTN"].status, found["NVTE_FUSED_ATTN"].value) == ("ok", "0")
    assert found["NVTE_TORCH_COMPILE"].value == "1 (nothing here reads it)"
    missing = {name: one.fix for name, one in found.items() if one.status == doctor.MISSING}
    assert list(missing) == [
        "transformer_engine_cu13: transformer_engine",
        "nvdlfw-inspect: nvdlfw_inspect",
    ]
    assert "uninstall nvdlfw-inspect, then" in missing["nvdlfw-inspect: nvdlfw_inspect"]


def test_names_that_programs_look_for(monkeypatch):
    known = {"transformer-engine": "2.20.0"}
    monkeypatch.setattr(doctor, "_distribution", lambda name: known.get(name, ""))
    found = by_name(doctor.surroundings(doctor.Machine()))
    assert found["transformer-engine"].status == doctor.OK
    assert found["transformer-engine"].value == "the distribution, version 2.20.0"
    assert found["nvdlfw-inspect"].status == doctor.ABSENT  # nothing here needs it
    assert "pip install ./packaging/nvdlfw-inspect" in found["nvdlfw-inspect"].value


def test_every_variable_that_is_read_is_known():
    named = re.findall(r'"((?:NVTE|TE)_\w+)"', Path(_env.__file__).read_text())
    assert len(named) > 10
    assert set(named) <= set(_env._READ)
    documented = set(re.findall(r"\bNVTE_\w+", _env.AttentionVariables.__doc__))
    recipes = {
        "NVTE_BACKWARD_OVERRIDE",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    }
    others = {"NVTE_DEBUG", *recipes}
    assert documented | others == {name for name in _env._READ if name.startswith("NVTE_")}


def test_a_probe_that_fails_is_a_finding(monkeypatch):
    def probe(machine):
        yield doctor.Finding("probe", "first", doctor.OK, "")
        raise ValueError("two\nlines")

    monkeypatch.setattr(doctor, "PROBES", (probe, doctor.devices))
    found = by_name(doctor.examine())
    assert found["first"].status == doctor.OK
    assert found["looking at probe"].value == "ValueError: two lines"
    assert found["cpu"].status == doctor.OK


def test_libraries_are_found_with_path_and_version(monkeypatch, tmp_path):
    libc = _libraries.Library("libc", "libc.so", (5, 6), "", lambda opened: "1.2.3", "LIBC")
    monkeypatch.setenv("TE_LIBC_PATH", str(tmp_path / "nothing.so"))
    path, version = _libraries.find(libc)
    assert Path(path).is_file()
    assert version == "1.2.3"
    nowhere = _libraries.Library("x", "libnowhere.so", (1,), "", lambda opened: "", "NOWHERE")
    with pytest.raises(OSError, match=r"libnowhere\.so\.1"):
        _libraries.find(nowhere)


def test_the_package_alone_imports_no_torch():
    code = (
        "import sys, transformer_engine as te\n"
        "assert 'torch' not in sys.modules and te.__version__\n"
        "sys.modules['torch'] = None\n"
        "try: te.pytorch\n"
        "except AttributeError as error: sys.exit(7 * ('import of torch' in str(error)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
    assert transformer_engine.common.recipe.DelayedScaling()
    assert transformer_engine.pytorch.Linear
    assert not hasattr(transformer_engine, "jax")


def test_a_reader_that_stops(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    command = f"{sys.executable} -m transformer_engine.doctor | head -c 1"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path[1:])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("v", "")


@pytest.mark.gpu
def test_on_a_gpu():
    findings = doctor.examine()
    assert [one for one in findings if one.status == doctor.MISSING] == []
    found = by_name(findings)
    for name in ("cuda:0", "NVIDIA driver", "cuBLASLt", "FP8 Linear on cuda", "plain on cuda"):
        assert found[name].status == doctor.OK, name
    assert Path(found["cuBLASLt"].path).is_file()
