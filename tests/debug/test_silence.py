"""A session that has logged nothing says why, and does not stop the training."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from debug_session import debugging, logged, section
from inspect_logs import messages

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te


def train(steps: int = 2, fp8: bool = True, step: Callable[[], None] = debug_api.step) -> None:
    """Trains a model of three layers, with warnings ignored."""
    model = torch.nn.Sequential(
        te.Linear(16, 16, device="cpu", name="a"),
        te.LayerNormMLP(16, 32, device="cpu", name="b"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            with te.fp8_autocast(enabled=fp8):
                y = model(torch.randn(16, 16))
            y.sum().backward()
            step()


def fp8_stats(layers: str = ".", **keys) -> dict:
    return section("LogFp8TensorStats", layers, tensors=["weight"], stats=["mse"], **keys)


@pytest.mark.parametrize(
    ("config", "run", "said"),
    [
        (fp8_stats(), {"step": lambda: None}, "debug_api.step() was never called"),
        (fp8_stats(), {"steps": 0}, "no layer of transformer_engine.pytorch has run"),
        (fp8_stats("nobody"), {}, "section section0 selects none of the 3 layers that ran"),
        (fp8_stats(), {"fp8": False}, "layers cast inside te.fp8_autocast(enabled=True)"),
        (fp8_stats(start_step=7), {}, "never came due: the last step was 1, its next step is 7"),
        (fp8_stats(enabled=False), {}, "no section that is enabled"),
        (section("DisableFP8Layer"), {}, "no feature of the configuration logs statistics"),
    ],
)
def test_show_says_why_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict, run: dict, said: str
) -> None:
    with debugging(tmp_path, config):
        train(**run)
        debug_api.show()
    out = capsys.readouterr().out
    assert out.startswith("[show] nothing to show:\n")
    assert said in out


def test_show_never_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debug_api.show()
    debug_api.show(tmp_path / "nowhere")
    said = capsys.readouterr().out
    assert "no session is running" in said
    assert "which is not there" in said


@pytest.mark.parametrize(
    ("stats", "gemms", "said"),
    [
        (["mse_columnwise"], ["wgrad"], "one takes it rowwise, see underflows%"),
        (["mse"], ["fprop"], "one takes it columnwise, see underflows%_columnwise"),
        (["mse"], ["fprop", "wgrad"], "no GEMM in FP8 takes it, because a feature or the layer"),
    ],
)
def test_a_tensor_that_is_not_cast_inside_autocast_has_another_reason(
    tmp_path: Path, stats: list[str], gemms: list[str], said: str
) -> None:
    config = section("LogFp8TensorStats", tensors=["activation"], stats=stats)
    config["transformer_engine"]["DisableFP8GEMM"] = {"enabled": True, "gemms": gemms}
    with debugging(tmp_path, config):
        train()
    (reason, *others) = {line.partition(": ")[2] for line in messages(tmp_path) if "Skip" in line}
    assert said in reason and not others


def test_one_warning_for_all_tensors_without_casts(tmp_path: Path) -> None:
    config = section("LogFp8TensorStats", tensors=["weight", "activation"], stats=["mse"])
    model = torch.nn.Sequential(*(te.Linear(16, 16, device="cpu", name=n) for n in "abc"))
    with (
        debugging(tmp_path, config),
        pytest.warns(UserWarning, match="Skipping stats collection for layer a") as caught,
    ):
        for _ in range(2):
            model(torch.ones(16, 16)).sum().backward()
            debug_api.step()
    assert len(caught) == 1
    logged = [line for line in messages(tmp_path) if "Skipping stats" in line]
    assert len(logged) == 6  # the debug log has a line for each tensor


def test_a_section_that_never_came_due_is_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules: list[dict] = [{}, {"start_step": 7}, {"end_step": 0}, {"freq": 2}]
    layers = ("^a$", "fc1", "fc2", "nobody")
    sections = [fp8_stats(n, **keys) for n, keys in zip(layers, schedules, strict=True)]
    with debugging(tmp_path, *sections, init_training_step=1):
        train()
        assert "never came due" not in capsys.readouterr().err
    told = [line for line in capsys.readouterr().err.splitlines() if "never came due" in line]
    assert [line.partition("section ")[2] for line in told] == [
        "section1 never came due: the last step was 2, its next step is 7",
        "section2 never came due: the last step was 2, it has no step after that",
    ]


@pytest.mark.parametrize("tensor", ["gradient", "dgrad", "wgrad"])
@pytest.mark.parametrize("feature", ["LogTensorStats", "DumpTensors"])
def test_a_backward_after_its_step_belongs_to_the_next_iteration(
    tmp_path: Path, feature: str, tensor: str
) -> None:
    body = {"LogTensorStats": {"stats": ["max"]}, "DumpTensors": {"high_precision_tensor": True}}
    layer = te.Linear(16, 16, device="cpu", name="a")
    for freq in (1, 2):
        folder = tmp_path / f"{freq}"
        with debugging(folder, section(feature, tensors=[tensor], freq=freq, **body[feature])):
            y = layer(torch.randn(16, 16, requires_grad=True))
            debug_api.step()
            y.sum().backward()
            debug_api.step()
        dumps = folder / "tensor_dumps"
        found = {int(path.parent.name.removeprefix("iter_")) for path in dumps.rglob("*.pt")}
        if (folder / "statistics_rank-0.jsonl").stat().st_size:
            found |= {iteration for iteration, _, _ in logged(folder)}
        assert found == ({1} if freq == 1 else set())
        lines = [line for line in messages(folder) if "between a forward and its backward" in line]
        assert [line.rpartition(",")[2] for line in lines] == [f" miss {tensor}"] * (freq - 1)


def test_sections_that_select_no_layer_are_told_without_a_step(tmp_path: Path) -> None:
    config = section("DisableFP8Layer", r"a\.")
    with pytest.warns(UserWarning, match="selects no layer among 1 layer"):  # noqa: SIM117
        with debugging(tmp_path, config), torch.no_grad():
            te.Linear(16, 16, device="cpu", name="a")(torch.randn(16, 16))
    with debugging(tmp_path, config):
        pass  # no layer ran: the configuration may be right


def test_sections_are_told_of_a_step_in_which_only_layers_of_torch_ran(tmp_path: Path) -> None:
    message = "selects no layer; no layer of transformer_engine.pytorch has run yet"
    with debugging(tmp_path, section("DisableFP8Layer", r"a\.")):
        torch.nn.Linear(16, 16)(torch.randn(16, 16)).sum().backward()
        with pytest.warns(UserWarning, match=message):
            debug_api.step()


@pytest.mark.parametrize("others", [["weight"], []], ids=["of both", "of the backward"])
@pytest.mark.parametrize("tensor", ["gradient", "wgrad"])
@pytest.mark.parametrize(("calls", "told"), [("fsbssfsbs", 1), ("fbsfbssfbs", 0)])
def test_a_backward_of_compiled_code_after_its_step_is_told_once(
    tmp_path: Path, calls: str, told: int, tensor: str, others: list[str]
) -> None:
    """`calls` are forwards, backwards and steps; statistics are due in every second iteration."""
    layer = te.Linear(16, 16, device="cpu", name="a")
    config = section("LogTensorStats", tensors=[*others, tensor], stats=["max"], freq=2)
    with debugging(tmp_path, config):
        run = torch.compile(layer, backend="aot_eager")
        for call in calls:
            if call == "f":
                y = run(torch.randn(16, 16, requires_grad=True))
            elif call == "b":
                y.sum().backward()
            else:
                debug_api.step()
    lines = [line for line in messages(tmp_path) if "between a forward and its backward" in line]
    assert [line.rpartition(",")[2] for line in lines] == [f" miss {tensor}"] * told
