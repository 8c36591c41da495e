"""`python -m transformer_engine.doctor`: what is here, what works, what is missing, what fixes it.

Looks at versions, devices, libraries, the native modules and attention backends; runs a layer in
FP8 on each kind of device. It prints findings, never a traceback, whatever is broken.

Exit code: 0 where everything that is needed is here, 1 where something is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformer_engine import __version__, _build, _env, _libraries, _torch_floor

OK, ABSENT, MISSING = "ok", "absent", "missing"  # absent: nothing that is here needs it
# The names of distributions that programs look for, and the command that installs each of them.
NAMES = {
    "transformer-engine": "`pip install .` in the sources",
    "nvdlfw-inspect": "`pip install ./packaging/nvdlfw-inspect` in the sources",
}
PACKAGES = ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect")
TORCH_FOR_GPUS = "install torch for CUDA: see https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: the part of the report that lists it.
        name: what was looked at.
        status: "ok", "absent" (and not needed) or "missing" (needed).
        value: version, description, or what went wrong.
        path: the file, where there is one.
        fix: the command that mends it.
        details: more lines, by name.
    """

    section: str
    name: str
    status: str
    value: str
    path: str = ""
    fix: str = ""
    details: dict[str, str] = field(default_factory=dict)


class Machine:
    """The modules that probes share: each is imported once, and errors of imports are kept."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    def load(self, name: str) -> Any:
        """The module; None where it cannot be imported, for the reason in `errors`."""
        if name not in self._found:
            self._found[name] = None
            try:
                module = importlib.import_module(name)
                if name == "torch" and not hasattr(module, "Tensor"):  # an empty folder imports too
                    raise ImportError(f"{module} is not PyTorch")
                self._found[name] = module
            except (Exception, SystemExit) as error:
                self.errors[name] = described(error)
        return self._found[name]

    @property
    def cuda(self) -> bool:
        """Whether torch can use a GPU."""
        torch = self.load("torch")
        return torch is not None and bool(torch.cuda.is_available())


def described(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def versions(machine: Machine) -> Iterator[Finding]:
    """Versions of this package, Python, torch, the CUDA that torch was built with, the driver."""
    here = str(Path(__file__).parent)
    yield Finding("versions", "transformer_engine", OK, __version__, here)
    yield Finding("versions", "Python", OK, platform.python_version(), sys.executable)
    torch = machine.load("torch")
    if torch is None:
        error = machine.errors["torch"]
        again = "" if error.startswith("ModuleNotFoundError") else "--force-reinstall "
        fix = f"python -m pip install {again}torch"
        yield Finding("versions", "torch", MISSING, error, fix=fix)
    else:
        yield _torch_version(torch)
        cuda = torch.version.cuda
        yield Finding("versions", "CUDA of torch", OK if cuda else ABSENT, cuda or "built without")
    try:
        version, cuda = _libraries.driver()
    except OSError:
        yield Finding("versions", "NVIDIA driver", ABSENT, "not found")
        return
    fix = "" if machine.cuda or torch is None else TORCH_FOR_GPUS
    yield Finding("versions", "NVIDIA driver", OK, f"{version}, up to CUDA {cuda}", fix=fix)


def _torch_version(torch: Any) -> Finding:
    path = str(Path(torch.__file__).parent) if getattr(torch, "__file__", None) else ""
    if _torch_floor.complaint(torch.__version__):
        value = f"{torch.__version__}, older than {_torch_floor.as_text(_torch_floor.OLDEST)}"
        fix = "python -m pip install --upgrade torch"
        return Finding("versions", "torch", MISSING, value, path, fix)
    return Finding("versions", "torch", OK, str(torch.__version__), path)


def devices(machine: Machine) -> Iterator[Finding]:
    """The CPU, and each GPU that torch sees."""
    yield Finding("devices", "cpu", OK, f"{platform.machine()}, {os.cpu_count()} cores")
    if not machine.cuda:
        yield Finding("devices", "cuda", ABSENT, "torch sees no GPU")
        return
    torch = machine.load("torch")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        value = f"{found.name}, compute capability {found.major}.{found.minor}"
        value += f", {found.total_memory / 2**30:.0f} GiB"
        yield Finding("devices", f"cuda:{index}", OK, value)
        core = machine.load("transformer_engine._C")
        if core is not None and core.built_with_cuda():
            limits = machine.load("transformer_engine._devices")
            for part, text in limits.described(limits.device_limits(index)).items():
                yield Finding("devices", f"cuda:{index}, {part}", OK, text)


def native(machine: Machine) -> Iterator[Finding]:
    """The extension modules and the packages on top of them."""
    core = machine.load("transformer_engine._C")
    if core is None:
        yield _broken(machine, "transformer_engine._C")
    else:
        value = "backends: CPU, CUDA" if core.built_with_cuda() else "backends: CPU"
        yield Finding("native", core.__name__, OK, value, core.__file__)
        yield from _left_out(machine)
    engine = machine.load("nvdlfw_inspect._engine")
    if engine is None:
        yield _broken(machine, "nvdlfw_inspect._engine")
    else:
        yaml = _libraries.mapped("libyaml-cpp")
        value = f"reads YAML with {Path(yaml).resolve().name}" if yaml else "loaded"
        yield Finding("native", engine.__name__, OK, value, engine.__file__)
    if machine.load("torch") is None or core is None:
        return
    if machine.load("transformer_engine.pytorch") is None:
        yield _broken(machine, "transformer_engine.pytorch")
        return
    for device in ("cpu", "cuda") if machine.cuda else ("cpu",):
        yield _trial(machine, device)


def _left_out(machine: Machine) -> Iterator[Finding]:
    """What the build lacks: "missing" where there is a GPU, with a fix where torch has CUDA."""
    torch = machine.load("torch")
    cuda = torch.version.cuda if torch is not None else None
    for one in _build.left_out():
        told = f"for a GPU, {one.command}"
        if machine.cuda or cuda:
            told = "torch sees a GPU" if machine.cuda else f"torch is built for CUDA {cuda}"
        value = f"left out of this build: {one.reason}; {told}"
        fix = one.command if machine.cuda or cuda else ""
        yield Finding("native", one.part, MISSING if machine.cuda else ABSENT, value, fix=fix)


def _broken(machine: Machine, name: str) -> Finding:
    error = machine.errors[name]
    source = Path(__file__).parents[1]
    installed = _installed_elsewhere(source)
    if installed:
        fix = f"run from another folder: {source} hides the package installed in {installed}"
    elif (source / "CMakePresets.json").is_file():
        fix = f"cd {source} && cmake --preset cpu-release && cmake --build --preset cpu-release"
    else:
        fix = "in the sources: python -m pip install --force-reinstall --no-deps ."
    if "libyaml-cpp" in error:
        fix = f"apt-get install libyaml-cpp-dev; {fix}"
    return Finding("native", name, MISSING, error, fix=fix)


def _installed_elsewhere(source: Path) -> str:
    """Where the package is installed, if not in `source`; "" if it is not."""
    try:
        found = importlib.metadata.distribution("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ""
    folder = Path(str(found.locate_file("")))
    there = (folder / "transformer_engine" / "doctor.py").is_file()
    return str(folder) if there and folder.resolve() != source.resolve() else ""


def _trial(machine: Machine, device: str) -> Finding:
    """A Linear in FP8, forward and backward."""
    torch, te = machine.load("torch"), machine.load("transformer_engine.pytorch")
    name = f"FP8 Linear on {device}"
    try:
        layer = te.Linear(32, 32, device=device, name="doctor")
        with te.autocast(enabled=True):
            layer(torch.ones(16, 32, device=device)).sum().backward()
        finite = bool(torch.isfinite(layer.weight.grad).all())
    except Exception as error:
        fix = ""
        if "libcublasLt" in str(error):
            fix = "python -m pip install nvidia-cublas, or set TE_CUBLASLT_PATH to its file"
        return Finding("native", name, MISSING, described(error), fix=fix)
    if not finite:
        return Finding("native", name, MISSING, "gradients are not finite")
    return Finding("native", name, OK, "forward and backward run")


def libraries(machine: Machine) -> Iterator[Finding]:
    """Shared libraries of CUDA, and optional packages."""
    torch = machine.load("torch")
    cuda = str(torch.version.cuda or "").partition(".")[0] if torch is not None else ""
    core = machine.load("transformer_engine._C")
    needed = machine.cuda and core is not None and core.built_with_cuda()
    for library in _libraries.LIBRARIES:
        try:
            path, version = _libraries.find(library)
            yield Finding("libraries", library.title, OK, version, path)
        except OSError as error:
            if needed and library.variable == "CUBLASLT":
                fix = f"python -m pip install {library.package.format(cuda=cuda)}"
                yield Finding("libraries", library.title, MISSING, str(error), fix=fix)
            else:
                yield Finding("libraries", library.title, ABSENT, "not found")
    yaml = _libraries.mapped("libyaml-cpp")
    if yaml:
        version = Path(yaml).resolve().name.partition(".so.")[2]
        yield Finding("libraries", "yaml-cpp", OK, version, yaml)
    else:
        yield Finding("libraries", "yaml-cpp", ABSENT, "not loaded, or linked statically")
    for title, names in {
        "flash-attn": ("flash-attn", "flash-attn-3", "flash-attn-4"),
        "cudnn-frontend": ("nvidia-cudnn-frontend",),
    }.items():
        found = [f"{name} {version}" for name in names if (version := _distribution(name))]
        yield Finding("libraries", title, OK if found else ABSENT, ", ".join(found) or "not here")


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


ATTENTION_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries": {"num_gqa_groups": 4},
    "padding": {"attn_mask_type": "padding"},
    "packed sequences": {"qkv_format": "thd", "attn_mask_type": "padding_causal"},
    "a mask of one's own": {"attn_mask_type": "arbitrary"},
    "a sliding window": {"window_size": (128, 0)},
    "ALiBi": {"core_attention_bias_type": "alibi"},
    "bias before the scale": {"core_attention_bias_type": "pre_scale_bias"},
    "bias after the scale": {"core_attention_bias_type": "post_scale_bias"},
    "repeatable gradients": {"deterministic": True},
}


def attention(machine: Machine) -> Iterator[Finding]:
    """Which backend serves which kind of attention, and why others do not."""
    if machine.load("torch") is None or machine.load("transformer_engine.pytorch") is None:
        return
    package = machine.load("transformer_engine.pytorch.attention")
    for device in ("cpu", "cuda") if machine.cuda else ("cpu",):
        always = package.attention_backends(device=device)  # listed once, for the plain problem
        for name, changes in ATTENTION_PROBLEMS.items():
            refusals = package.attention_backends(device=device, **changes)
            takes = [backend for backend, refusal in refusals.items() if refusal is None]
            yield Finding(
                "attention",
                f"{name} on {device}",
                OK if takes else MISSING,
                takes[0] if takes else "no backend takes it",
                fix="" if takes else "unset NVTE_UNFUSED_ATTN",
                details={
                    backend: why
                    for backend, why in refusals.items()
                    if why is not None and (why != always[backend] or not changes)
                },
            )


def surroundings(machine: Machine) -> Iterator[Finding]:
    """Environment variables, names of distributions, and packages with files of our names."""
    for name, (value, known) in _env.variables_set().items():
        text = value if known else f"{value} (nothing here reads it)"
        yield Finding("surroundings", name, OK if known else ABSENT, text)
    for name, way in NAMES.items():
        found = _distribution(name)
        value = f"the distribution, version {found}"
        if not found:
            value = f"no distribution of this name; programs that look for it need {way}"
        yield Finding("surroundings", name, OK if found else ABSENT, value)
    owners = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        for name in sorted({*owners.get(package, ())}):
            if name.replace("_", "-") != "transformer-engine":
                value = f"{_distribution(name)} installs a package {package} too:"
                value += " one overwrites the other"
                fix = f"python -m pip uninstall {name}, then install this one again"
                yield Finding("surroundings", f"{name}: {package}", MISSING, value, fix=fix)


PROBES: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    versions,
    devices,
    native,
    libraries,
    attention,
    surroundings,
)


def examine() -> list[Finding]:
    """Run all probes. A probe that raises becomes a finding.

    >>> any(finding.name == "Python" for finding in examine())
    True
    """
    machine = Machine()
    findings: list[Finding] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for probe in PROBES:
            try:
                for finding in probe(machine):
                    findings.append(finding)  # one by one, which keeps those before an error
            except Exception as error:
                name = f"looking at {probe.__name__}"
                findings.append(Finding(probe.__name__, name, MISSING, described(error)))
    return findings


def as_text(findings: Sequence[Finding]) -> str:
    """The findings by section, then what to do."""
    lines: list[str] = []
    section = ""
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        mark = {OK: "ok", ABSENT: "-"}.get(finding.status, "MISSING")
        path = f"  [{finding.path}]" if finding.path else ""
        lines.append(f"  {mark:<7}  {finding.name:<{width}}  {finding.value}{path}")
        lines += [f"  {'':7}  {'':{width}}  not {k}: {v}" for k, v in finding.details.items()]
    fixes = [finding for finding in findings if finding.fix]
    if fixes:
        lines += ["", "what to do", *(f"  {one.name}: {one.fix}" for one in fixes)]
    missing = [finding.name for finding in findings if finding.status == MISSING]
    last = f"missing: {', '.join(missing)}" if missing else "everything that is needed is here"
    if fixes and not missing:
        last += f"; worth doing: {', '.join(finding.name for finding in fixes)}"
    return "\n".join([*lines, "", last])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer_engine.doctor",
        description="What is here, what works, what is missing, and the command that fixes it.",
        epilog="Exit code: 0 everything that is needed is here, 1 something is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    as_json = parser.parse_args(arguments).json
    findings = examine()
    ok = all(finding.status != MISSING for finding in findings)
    text = as_text(findings)
    if as_json:
        text = json.dumps({"ok": ok, "findings": [asdict(one) for one in findings]}, indent=1)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, as in `| head`, is gone: the flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
