"""Tests an installed wheel: it must not need libraries of this machine, and a layer must train.

tools/wheel.sh runs this in a clean environment, from a folder without sources. If torch is not
installed, only the parts that do not need torch are tested.
"""

import importlib.metadata
import importlib.util
import tempfile
from pathlib import Path

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect import _engine
from transformer_engine import _C, __version__, doctor


def libraries() -> set[str]:
    """Names of the shared libraries that are loaded in this process."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {Path(path).name for path in mapped if ".so" in path}


def inspect() -> None:
    """Run a debug session that reads a configuration, with the yaml-cpp of the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        statistics = "LogTensorStats: {enabled: True, tensors: [activation], stats: [mean]}"
        config.write_text(f"a:\n  enabled: True\n  layers: {{layer_types: [x]}}\n  {statistics}\n")
        debug_api.initialize(str(config), log_dir=folder)
        debug_api.end_debug()


def train() -> None:
    """Run a layer in FP8, forward and backward, on the CPU and on a GPU if there is one."""
    import torch  # noqa: PLC0415 - it may be absent

    import transformer_engine.pytorch as te  # noqa: PLC0415

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        layer = te.TransformerLayer(64, 128, 4, device=device)
        with te.autocast(enabled=True):
            layer(torch.randn(16, 2, 64, device=device)).sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        assert all(g is not None and torch.isfinite(g).all() for g in gradients)
        print(f"  trained on {device}")


def main() -> None:
    """Run all tests that this machine can run."""
    assert "site-packages" in str(_C.__file__), f"{_C.__file__} is not installed"
    assert __version__ == importlib.metadata.version("transformer-engine")
    ours = {name for name in libraries() if name.startswith(("libstdc++", "libyaml-cpp"))}
    assert not ours, f"a clean machine may lack {ours}"
    inspect()
    parts = ", ".join(part for part, _, _ in _C.left_out()) or "nothing"
    print(f"  {Path(_C.__file__).name}, {Path(_engine.__file__).name}; left out: {parts}")
    if importlib.util.find_spec("torch") is None:
        print("  without torch: imports and reads a configuration")
        return
    train()
    missing = [one.name for one in doctor.examine() if one.status == doctor.MISSING]
    assert not missing, f"doctor misses {missing}"


if __name__ == "__main__":
    main()
