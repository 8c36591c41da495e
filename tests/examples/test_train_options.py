"""train_gpt.py: Ctrl-C, --resume, and options that have no effect."""

import shlex
import signal
from pathlib import Path

import pytest
from train_gpt_runs import assert_same_run, run, write_text

import train_gpt
from gpt.options import command_to_go_on, named_options, notes
from gpt.training import Training


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a new directory that contains a text."""
    monkeypatch.chdir(tmp_path)
    write_text()


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises SIGINT while a step runs, like Ctrl-C."""
    whole_step = Training.step

    def step_of_a_busy_person(self: Training) -> None:
        if self.done == step:
            signal.raise_signal(signal.SIGINT)
        whole_step(self)

    monkeypatch.setattr(Training, "step", step_of_a_busy_person)


def test_ctrl_c_saves_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--recipe", "current", "--dropout", "0.1", "--sample", "0"]
    run(*options, "--checkpoint", "whole.pt")
    with monkeypatch.context() as patch:
        interrupt_at(7, patch)
        assert run(*options) == 130
    *_, said, command = capsys.readouterr().out.splitlines()
    assert said == "stopped after step 8, saved train_gpt.pt; go on with"
    words = shlex.split(command)
    assert (words[0], words[-3:]) == ("python", ["--checkpoint", "train_gpt.pt", "--resume"])
    assert train_gpt.main(words[2:]) == 0
    assert_same_run("whole.pt", "train_gpt.pt")


def test_ranks_go_on_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_gpt.py"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = ["--fsdp", "--checkpoint", "run.pt", "--stop-after", "3"]
    command = command_to_go_on(train_gpt.make_parser().parse_args(words), words)
    start = "torchrun --nproc-per-node 4 train_gpt.py"
    assert command == f"{start} --fsdp --checkpoint run.pt --resume"


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Training) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Training, "step", step)
    # A background process of a shell starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        signal.signal(signal.SIGINT, before)


def test_options_are_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    """The command to resume is made by searching for whole option names."""
    with pytest.raises(SystemExit):
        run("--check", "whole.pt")
    assert "unrecognized arguments: --check" in capsys.readouterr().err


def test_resume_takes_the_settings_of_the_run() -> None:
    run("--recipe", "current", "--dropout", "0.1", "--sample", "0", "--checkpoint", "whole.pt")
    options = ["--recipe", "current", "--dropout", "0.1", "--stop-after", "16"]
    run(*options, "--checkpoint", "parts.pt")
    train_gpt.main(["--checkpoint", "parts.pt", "--resume", "--sample", "0"])
    assert_same_run("whole.pt", "parts.pt")


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ("--precision fp32 --recipe current", "--recipe does nothing without --precision fp8"),
        ("--seeds 2", "--seeds does nothing without --compare"),
        ("--inspect-log here", "--inspect-log does nothing without --inspect"),
        ("--prompt x --sample 0", "--prompt does nothing with --sample 0"),
        ("--precision bf16", "bf16 is slow on most CPUs"),
    ],
)
def test_what_does_nothing_or_is_slow_is_told(arguments: str, note: str) -> None:
    parser = train_gpt.make_parser()
    words = ["--device", "cpu", *arguments.split()]
    parsed = parser.parse_args(words)
    settings = train_gpt.settings_of(parsed)
    (told,) = notes(parsed, named_options(parser, words), settings)
    assert told.startswith(note)
    usual = parser.parse_args(["--device", "cpu"])
    assert not [*notes(usual, set(), train_gpt.settings_of(usual))]


def test_a_comparison_tells_what_it_ignores(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--compare", "--steps", "2", "--recipe", "blocks", "--prompt", "x"]
    run(*options)
    err = capsys.readouterr().err
    assert "note: --recipe does nothing with --compare" in err
    assert "note: --prompt does nothing with --compare" in err


def test_a_bad_file_to_inspect_with_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text("a:\n  enabled: True\n   layers: {layer_types: [fc1]}\n")
    with pytest.raises(SystemExit):
        run("--inspect", "bad.yaml")
    *_, told = capsys.readouterr().err.splitlines()
    assert (
        "error: --inspect: [config] bad.yaml:3:10: expected YAML, got a line indented by 3" in told
    )
    assert told.endswith("(python -m nvdlfw_inspect check bad.yaml shows all mistakes)")
