"""Runs train_gpt.py as a user does, with a text and a model small enough for a test."""

import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_gpt_runs import (
    LAYERS,
    STEPS,
    TINY,
    VALIDATION_BATCHES,
    VALIDATIONS,
    assert_same_run,
    run,
    write_text,
)

import train_gpt
from gpt import report
from gpt.checkpoint import write_checkpoint
from gpt.data import bigram_loss, load_text
from gpt.model import Gpt
from gpt.settings import Settings
from gpt.torch_model import TorchGpt

FORWARD_GEMMS = 4 * LAYERS + 1  # query-key-value, projection, two of the MLP per layer; the head
CONFIG = Path(train_gpt.__file__).with_name("config.yaml")
HEAD_WITHOUT_FP8 = """
head_without_fp8:
  enabled: True
  layers:
    exact_layer_names: [head]
  transformer_engine:
    DisableFP8Layer:
      enabled: True
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a new directory that contains a text."""
    monkeypatch.chdir(tmp_path)
    write_text()


def settings_of(*arguments: str) -> Settings:
    parsed = train_gpt.make_parser().parse_args([*TINY, "--device", "cpu", *arguments])
    return train_gpt.settings_of(parsed)


def validation_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+, validation loss ([\d.]+)", output)]


@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks"])
def test_loss_falls_and_every_gemm_is_fp8(
    device: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--recipe", recipe, "--sample", "8", "--prompt", "the ", device=device) == 0
    output = capsys.readouterr().out
    losses = validation_losses(output)
    assert len(losses) == VALIDATIONS
    assert losses[-1] < losses[0] - 0.3
    gemms = FORWARD_GEMMS * (3 * STEPS + VALIDATIONS * VALIDATION_BATCHES)
    assert f"GEMMs: {gemms:,} fp8, 0 bf16, 0 fp32" in output
    assert "--- sample\nthe " in output
    assert re.search(r"bigram entropy +[\d.]+ nats/byte \([\d.]+ bits\)", output)
    if importlib.util.find_spec("matplotlib"):
        assert Path("train_gpt.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("weights", [[], ["--fp8-weights"]])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_resumed_run_equals_uninterrupted_run(recipe: str, weights: list[str]) -> None:
    options = ["--recipe", recipe, "--dropout", "0.1", "--sample", "0", *weights]
    run(*options, "--checkpoint", "whole.pt")
    run(*options, "--checkpoint", "parts.pt", "--stop-after", "7")
    run(*options, "--checkpoint", "parts.pt", "--stop-after", "16", "--resume")
    run(*options, "--checkpoint", "parts.pt", "--resume")
    whole = assert_same_run("whole.pt", "parts.pt")
    scaling = whole["model"]["head._extra_state"]
    assert (scaling.numel() > 0) == (recipe == "delayed" or bool(weights))


KILLED_WHILE_SAVING = """
import os, signal, sys
import torch, train_gpt

save, saved = torch.save, []

def killed(state, file):
    saved.append(file)
    if len(saved) < 3:
        return save(state, file)
    file.write(b"half of a checkpoint")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = killed
train_gpt.main(sys.argv[1:])
"""


def test_killed_and_resumed_run_equals_uninterrupted_run() -> None:
    options = ["--fp8-weights", "--dropout", "0.1", "--sample", "0"]
    run(*options, "--checkpoint", "whole.pt")
    arguments = [*TINY, "--data", "text", "--device", "cpu", *options, "--checkpoint", "parts.pt"]
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert torch.load("parts.pt", weights_only=True)["done"] == 2 * STEPS // VALIDATIONS
    run(*options, "--checkpoint", "parts.pt", "--resume")
    assert_same_run("whole.pt", "parts.pt")


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "run.pt", []
    synchronize = os.fsync

    def recorded(file: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(file).st_mode), os.fstat(file).st_size, path.exists()))
        synchronize(file)

    monkeypatch.setattr(os, "fsync", recorded)
    write_checkpoint({"done": 1}, path)
    (is_folder, size, named), (then_folder, _, then_named) = seen
    assert (is_folder, size, named) == (False, path.stat().st_size, False)
    assert (then_folder, then_named) == (True, True)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("recipe", ["current", "blocks"])
def test_fp8_weights_with_masters_change_no_loss(recipe: str, device: str) -> None:
    """These recipes cast the fp32 weight in every step; with FP8 weights, the optimizer does."""
    options = ["--recipe", recipe, "--sample", "0"]
    for name, weights in (("cast.pt", []), ("kept.pt", ["--fp8-weights"])):
        run(*options, *weights, "--checkpoint", name, device=device)
    cast, fp8_weights = (torch.load(name, weights_only=True) for name in ("cast.pt", "kept.pt"))
    assert torch.equal(cast["losses"], fp8_weights["losses"])
    assert len(fp8_weights["masters"]) == FORWARD_GEMMS and not cast["masters"]


def test_resume_after_the_end_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--checkpoint", "run.pt", "--sample", "0"]
    run(*options)
    losses = validation_losses(capsys.readouterr().out)
    run(*options, "--resume")
    assert f"validation loss {losses[-1]:.4f} nats/byte" in capsys.readouterr().out


def test_compare_prints_table_and_verdict(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--compare", "--seeds", "2", device=device) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    gemms = f"{2 * FORWARD_GEMMS * (3 * STEPS + VALIDATIONS * VALIDATION_BATCHES):,}"
    ends = {"bf16": ["0", gemms, "0"], "fp8 delayed": [gemms, "0", "0"]}
    ends["fp8 current"] = ends["fp8 delayed"]
    for label, counts in ends.items():
        assert any(line.startswith(label) and line.split()[-3:] == counts for line in lines), label
    assert re.match(r"verdict, allowed [\d.]+ .*: fp8 delayed .*; fp8 current ", lines[-1])


@pytest.mark.parametrize(
    ("fp8", "kept_up", "verdict"),
    [
        ([2.018, 2.02], True, "fp8 delayed keeps up (+0.95%)"),
        ([2.03, 2.02], False, "fp8 delayed FALLS BEHIND (+1.25%)"),
        ([1.5, 1.5], True, "fp8 delayed keeps up (-25.00%)"),
    ],
)
def test_verdict_allows_one_percent(fp8: list[float], kept_up: bool, verdict: str) -> None:
    table, result = report.comparison([*outcomes("bf16", [2, 2]), *outcomes("fp8 delayed", fp8)], 3)
    assert result is kept_up
    assert table.endswith(f"verdict, allowed 0.0200 (1% of bf16): {verdict}")


def test_verdict_allows_the_spread_of_the_seeds() -> None:
    runs = [*outcomes("bf16", [1.9, 2.1]), *outcomes("fp8 current", [2.1, 2.2])]
    table, kept_up = report.comparison(runs, bigram=3)
    assert kept_up
    assert "allowed 0.2000 (the spread of the bf16 seeds)" in table


def test_verdict_does_not_take_fp8_on_trust() -> None:
    runs = [*outcomes("bf16", [2]), *outcomes("fp8 delayed", [2], fp32=1)]
    table, kept_up = report.comparison(runs, bigram=3)
    assert not kept_up
    assert "fp8 delayed RAN GEMMS IN HIGHER PRECISION" in table


def outcomes(label: str, finals: list[float], fp32: int = 0) -> list[report.Outcome]:
    gemms = {"fp8": 0, "bf16": 0, "fp32": fp32}
    return [report.Outcome(label, [], [(1, final)], 0.0, gemms) for final in finals]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data nowhere", "--data nowhere: No such file or directory"),
        ("--data short", "the training part has 27 bytes .* each needs more than --seq 32"),
        ("--hidden 30 --heads 4", "--hidden must be a multiple of --heads, got 30 and 4"),
        ("--hidden 40 --heads 4", "--hidden must be a multiple of 16 for FP8, got 40"),
        ("--hidden 48 --heads 16", "--hidden / --heads must be even, got 48 / 16 = 3"),
        ("--steps 0", "--steps must be above 0, got 0"),
        ("--lr -1", "--lr must be above 0, got -1.0"),
        ("--lr 1e30", r"the loss is nan at step \d+; lower --lr"),
        ("--dropout 1", "--dropout must be at least 0 and below 1, got 1.0"),
        ("--validate-every 0", "--validate-every must be above 0, got 0"),
        ("--precision int8", "invalid choice: 'int8'"),
        ("--model torch", "--model torch has no FP8; choose --precision fp32 or bf16"),
        ("--resume", "--resume needs --checkpoint PATH"),
        ("--resume --checkpoint no.pt", "there is no checkpoint no.pt"),
        ("--resume --checkpoint short", "short is no checkpoint of train_gpt.py, or is damaged"),
        ("--fp8-weights --precision bf16", "--fp8-weights needs --precision fp8, got bf16"),
        ("--stop-after 3", "--stop-after needs a step above 0, and --checkpoint PATH"),
        ("--seeds 0", "--seeds must be above 0, got 0"),
        ("--prompt=", "--sample must not be negative, and --prompt not empty"),
        ("--checkpoint no/run.pt", "--checkpoint no/run.pt: there is no folder no"),
        ("--lr nan", "--lr must be finite, got nan"),
        ("--checkpoint .", "--checkpoint .: expected a file, got a folder"),
        ("--plot no/plot.png", "--plot no/plot.png: there is no folder no"),
        ("--plot x.txt", "--plot x.txt: expected a name that ends in .png, .pdf or .svg"),
        ("--inspect no.yaml", "--inspect no.yaml: there is no such file"),
        ("--inspect short --compare", "--inspect does not go with --compare"),
        ("--compare --model torch", "--compare goes with neither --checkpoint nor --model torch"),
    ],
)
def test_bad_arguments_say_what_is_wrong(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short").write_bytes(b"thirty bytes are not enough...")
    with pytest.raises(SystemExit) as error:
        run(*arguments.split())
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_an_absent_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(device="cuda")
    assert "this machine has no CUDA GPU that torch can use" in capsys.readouterr().err


def test_resume_with_other_settings_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    run("--checkpoint", "run.pt", "--stop-after", "1")
    with pytest.raises(SystemExit):
        run("--checkpoint", "run.pt", "--resume", "--lr", "0.5", "--hidden", "64")
    assert "of a run with --hidden 32 (now 64), --lr 0.01 (now 0.5)" in capsys.readouterr().err


def test_stopping_where_the_run_has_been_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    run("--checkpoint", "run.pt", "--stop-after", "2")
    with pytest.raises(SystemExit):
        run("--checkpoint", "run.pt", "--resume", "--stop-after", "1")
    assert "--stop-after 1: run.pt has step 2" in capsys.readouterr().err


def test_plain_torch_model_is_the_same_function() -> None:
    settings = settings_of("--layers", "2", "--precision", "fp32")
    ours, plain = Gpt(settings), TorchGpt(replace(settings, model="torch"))
    weights = dict(ours.named_parameters())
    names = {
        "layers.{}.self_attention.layernorm_qkv.layer_norm_": "layers.{}.attention_norm.",
        "layers.{}.self_attention.layernorm_qkv.": "layers.{}.qkv.",
        "layers.{}.self_attention.proj.": "layers.{}.projection.",
        "layers.{}.layernorm_mlp.layer_norm_": "layers.{}.mlp_norm.",
        "layers.{}.layernorm_mlp.fc1_": "layers.{}.up.",
        "layers.{}.layernorm_mlp.fc2_": "layers.{}.down.",
        "head.layer_norm_": "norm.",
    }
    with torch.no_grad():
        for te_name, parameter in weights.items():
            torch.nn.init.normal_(parameter, std=0.2)
            name = te_name
            for theirs, mine in names.items():
                for i in range(2):
                    name = name.replace(theirs.format(i), mine.format(i))
            plain.get_parameter(name).copy_(parameter)
    tokens = torch.randint(256, (2, 32))
    torch.testing.assert_close(ours(tokens), plain(tokens), rtol=1e-4, atol=1e-4)


def test_plain_torch_model_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "torch", "--precision", "bf16", "--sample", "0") == 0
    losses = validation_losses(capsys.readouterr().out)
    assert losses[-1] < losses[0]


def test_bigram_loss_is_what_the_last_byte_leaves_open() -> None:
    train = torch.tensor([0, 1, 0, 2] * 1000, dtype=torch.uint8)
    known = torch.tensor([[1, 0], [2, 0]])  # 0 always follows 1 and 2
    open_ = torch.tensor([[0, 1], [0, 2]])  # either follows 0
    assert bigram_loss(train, known) == pytest.approx(0, abs=0.01)
    assert bigram_loss(train, open_) == pytest.approx(0.6931, abs=0.01)


def test_library_text_is_the_same_every_time_and_split_by_file() -> None:
    text = load_text(None)
    again = load_text(None)
    assert torch.equal(text.train, again.train)
    assert torch.equal(text.validation, again.validation)
    assert len(text.train) > 5 * len(text.validation) > 100_000
    assert bytes(text.validation[:2000].tolist()) not in bytes(text.train.tolist())


class Terminal:
    """An error stream that claims to be a terminal, and stores its text."""

    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.skipif(not importlib.util.find_spec("tqdm"), reason="tqdm is not installed")
def test_bar_stays_out_of_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    run("--sample", "0")
    assert "loss " in terminal.written
    assert "tokens/s" in terminal.written
    output = capsys.readouterr().out
    assert len(validation_losses(output)) == VALIDATIONS
    assert "\r" not in output


def test_optional_packages_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("--sample", "0") == 0
    output = capsys.readouterr().out
    assert "no loss curve: matplotlib is not installed (pip install matplotlib)" in output
    assert re.search(rf"step {STEPS}/{STEPS}, loss [\d.]+, [\d,]+ tokens/s, 0 s left", output)


def test_inspected_run_follows_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(HEAD_WITHOUT_FP8)
    run("--inspect", "config.yaml", "--sample", "0")
    output = capsys.readouterr().out
    passes = 3 * STEPS + VALIDATIONS * VALIDATION_BATCHES
    assert f"GEMMs: {(FORWARD_GEMMS - 1) * passes:,} fp8, 0 bf16, {passes:,} fp32" in output
    assert "python -m nvdlfw_inspect summary inspect_log" in output
    (log,) = Path("inspect_log").glob("nvdlfw_inspect_logs/*.log")
    assert "head: Tensor: weight, gemm dgrad - High precision" in log.read_text()


def test_looking_changes_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for options in ((), ("--inspect", str(CONFIG))):
        run("--sample", "0", *options)
        losses.append(validation_losses(capsys.readouterr().out))
    assert losses[0] == losses[1]
    text = Path("inspect_log/statistics_rank-0.jsonl").read_text()
    rows = [json.loads(row) for row in text.splitlines()]
    assert {row["iteration"] for row in rows} == {0, 10, 20}
    layers = {row["layer"] for row in rows if row["statistic"] == "std"}
    assert len(layers) == FORWARD_GEMMS
    fp8 = {row["layer"] for row in rows if row["statistic"] == "underflows%"}
    assert fp8 == {"layer1.layernorm_mlp.fc1", "layer1.layernorm_mlp.fc2"}


def test_inspect_needs_its_file() -> None:
    with pytest.raises(SystemExit):
        run("--inspect", "missing.yaml")
