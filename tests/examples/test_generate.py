"""generate.py: texts are the same with and without a cache, token for token."""

from pathlib import Path

import pytest
import torch

import generate
from gpt.data import load_text
from gpt.generation import cast_once, without_cache, write
from gpt.model import build_model
from gpt.settings import Settings
from gpt.training import Training, arithmetic

PROMPTS = ["ab", "a longer prompt"]


def settings_on(device, **changes):
    values = {
        "data": None,
        "device": device,
        "model": "te",
        "precision": "fp32",
        "recipe": "delayed",
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "seq": 32,
        "batch": 4,
        "steps": 10,
        "lr": 1e-2,
        "dropout": 0.0,
        "seed": 1,
        "validate_every": 5,
    }
    return Settings(**{**values, **changes})


@pytest.mark.parametrize(
    ("precision", "temperature", "graph"),
    [
        ("fp32", 0.0, False),
        ("fp32", 1.0, False),
        ("fp32", 0.0, True),
        ("fp32", 1.0, True),
        ("fp8", 0.0, False),
        ("fp8", 1.0, True),
    ],
)
def test_the_cache_changes_no_token(device, precision, temperature, graph):
    torch.manual_seed(2)
    settings = settings_on(device, precision=precision)
    model = build_model(settings).to(device).eval()
    written = write(model, settings, PROMPTS, 12, temperature, graph=graph)
    assert written.texts == without_cache(model, settings, PROMPTS, 12, temperature)
    assert [len(text) for text in written.texts] == [14, 27]
    assert written.texts[1].startswith(PROMPTS[1].encode())
    assert written.steps == 25, "one call for what all texts have, then one for each byte"


def test_the_plain_torch_model_keeps_a_cache(device):
    settings = settings_on(device, model="torch")
    model = build_model(settings).eval()
    written = write(model, settings, PROMPTS, 12)
    assert written.texts == without_cache(model, settings, PROMPTS, 12)


def test_bf16_weights_are_those_that_autocast_makes(device):
    """bf16 GEMMs read the same weights.

    Norms read rounded weights, but here these are 1 and 0.
    """
    settings = settings_on(device, precision="bf16")
    model = build_model(settings).eval()
    tokens = torch.tensor([list(b"some text")], device=device)
    with torch.no_grad(), arithmetic(settings):
        before = model(tokens)
        after = cast_once(model, settings)(tokens)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(before, after)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    data = tmp_path / "text"
    data.write_bytes(b"to be or not to be, that is the question. " * 200)
    settings = settings_on("cpu", data=str(data))
    training = Training(settings, load_text(settings.data))
    training.advance(3)
    training.save(tmp_path / "run.pt")
    return tmp_path / "run.pt"


def test_program(checkpoint, capsys):
    arguments = [str(checkpoint), "--device", "cpu", "--prompt", "to ", "--check"]
    assert generate.main(arguments) == 0
    output = capsys.readouterr().out
    assert "--- 'to '\nto " in output
    assert "the texts are the same" in output
    assert generate.main([*arguments, "--graph"]) == 0
    assert "the texts are the same" in capsys.readouterr().out
    two = ["--prompt", "to ", "--prompt", "a longer one"]  # up to the window by default
    assert generate.main([*arguments[:3], *two]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pt"], "there is no checkpoint missing.pt"),
        (["--prompt", "x" * 20, "--bytes", "20"], "have 40 bytes"),
        (["--prompt", "x" * 40], "prompts shorter than 32 bytes, the window of the model, got one"),
        ([__file__], "is no checkpoint of train_gpt.py, or is damaged"),
        (["--temperature", "-1"], "--temperature must not be negative, got -1.0"),
        (["--prompt", ""], "prompts that are not empty"),
    ],
)
def test_mistakes(checkpoint, capsys, arguments, message):
    where = [] if arguments[0].endswith((".pt", ".py")) else [str(checkpoint)]
    assert generate.main([*where, *arguments, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
