"""A debugger session that `kills.py` kills: `session_to_kill.py FOLDER`.

Until it is killed, it prints the number of each step whose statistics are written.
"""

from __future__ import annotations

import itertools
import sys

import torch

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te

TENSORS, STATISTICS = ("activation", "gradient", "weight"), ("max", "mean", "std")


def main(folder: str) -> None:
    """Train a layer without end."""
    section = {"enabled": True, "tensors": [*TENSORS], "stats": [*STATISTICS]}
    config = {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "."},
        "transformer_engine": {"LogTensorStats": section},
    }
    layer = te.Linear(32, 32, device="cpu", name="layer")
    debug_api.initialize({"log": config}, log_dir=folder)
    for step in itertools.count():
        layer(torch.randn(16, 32)).sum().backward()
        debug_api.step()
        debug_api.flush()
        print(step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
