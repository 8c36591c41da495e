"""Sessions with many layers that come and go, evaluations between steps, and threads."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from debug_session import Config, debugging, logged, section

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.debug.session import collector

LOG = section("LogTensorStats", tensors=["activation", "weight", "gradient"], stats=["max", "mean"])
DUMP = section("DumpTensors", tensors=["activation"], high_precision_tensor=True)


def run(layer: torch.nn.Module, value: float = 1.0) -> None:
    layer(torch.full((16, 16), value)).sum().backward()


def test_layers_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    stays = te.Linear(16, 16, device="cpu", name="stays")
    with debugging(tmp_path, LOG):
        for step in range(5):
            run(te.Linear(16, 16, device="cpu", name=f"layer{step}"), step + 1.0)
            run(stays, step + 1.0)
            gc.collect()
            debug_api.step()
        found = collector()
        assert len(found._live()) == 3
        (buffer,) = found._buffers.values()
        assert len(buffer.slots) == 6
    rows = logged(tmp_path)
    for step in range(5):  # each step has its values
        for layer in ("stays", f"layer{step}"):
            assert rows[step, layer, "activation"]["max"] == step + 1.0
            assert {"max", "mean"} == set(rows[step, layer, "gradient"])
    assert len(rows) == 5 * 2 * 3


class Grouped(te.GroupedLinear):
    """A GroupedLinear whose rows all belong to the first GEMM."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, [16])


LAYERS = {
    "layer": lambda: te.Linear(16, 16, device="cpu", name="layer"),
    "layer.gemm_0": lambda: Grouped(1, 16, 16, device="cpu", name="layer"),
}


def validate(layer: torch.nn.Module) -> None:
    layer.eval()
    with torch.no_grad():
        layer(torch.full((16, 16), 100.0))
    layer.train()


@pytest.mark.parametrize("beside", [[], [DUMP]], ids=["alone", "beside DumpTensors"])
@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_validation_does_not_count_in_the_step_of_a_training(
    tmp_path: Path, name: str, place: str, beside: list[Config]
) -> None:
    layer = LAYERS[name]()
    with debugging(tmp_path, LOG, *beside):
        for value in (1.0, 2.0):
            if place == "before":
                validate(layer)
            for microbatch in range(2):
                run(layer, value + microbatch)
            if place == "behind":
                validate(layer)
            debug_api.step()
    rows = logged(tmp_path)
    for step in range(2):
        assert rows[step, name, "activation"] == {"max": step + 2.0, "mean": step + 1.5}


def test_an_evaluation_alone_is_logged(tmp_path: Path) -> None:
    layer = te.Linear(16, 16, device="cpu", name="layer")
    with debugging(tmp_path, LOG):
        validate(layer)
        debug_api.step()
    assert logged(tmp_path)[0, "layer", "activation"]["max"] == 100.0


@pytest.mark.filterwarnings("ignore:.*selects no layer", "ignore:.*never written")
def test_threads_that_begin_and_end_sessions(tmp_path: Path) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        layer = te.Linear(16, 16, device="cpu", name=f"layer{number}")
        for _ in range(8):
            try:
                debug_api.initialize({"log": LOG}, log_dir=tmp_path / str(number))
            except ValueError as error:
                if "expected no running session" not in str(error):
                    wrong.append(repr(error))
            try:
                run(layer)
                debug_api.step()
                debug_api.end_debug()
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    debug_api.end_debug()
    assert not wrong, wrong
