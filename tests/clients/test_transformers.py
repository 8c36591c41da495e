"""transformers: `Trainer` through accelerate, and saved models that contain our layers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

pytestmark = [
    # From torch's DataLoader, when transformers asks for pinned memory without a GPU.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TOKENS, LENGTH = 64, 16


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=LENGTH))


def trainer(model: nn.Module, device: str, folder: Path, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, TOKENS, (LENGTH,), generator=generator) for _ in range(4)]
    settings = TrainingArguments(
        output_dir=str(folder),
        use_cpu=device == "cpu",
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        **{"max_steps": 8, "save_strategy": "no", **arguments},
    )
    # One process with two GPUs would use DataParallel, with which accelerate refuses FP8.
    settings._n_gpu = min(settings.n_gpu, 1)
    rows = [{"input_ids": one, "labels": one} for one in ids]
    return Trainer(model=model, args=settings, train_dataset=rows)


def fp8_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")


def losses_of(run: Trainer) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def test_trainer_runs_in_fp8(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fp8_by_environment(monkeypatch)
    run = trainer(llama(), device, tmp_path)
    te.gemm_report(reset=True)
    run.train()
    converted = [m for m in run.model.modules() if type(m) is te.Linear]
    assert len(converted) == 2 * 7 + 1
    report = te.gemm_report()
    assert report.total("fp8") == report.total() == 8 * len(converted) * 3
    losses = losses_of(run)
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_a_trained_model_loads_as_a_plain_one(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fp8_by_environment(monkeypatch)
    run = trainer(llama(), device, tmp_path, max_steps=1)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(value.dtype is torch.uint8 for key, value in saved.items() if "_extra" in key)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    trained = dict(run.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained[name].cpu())


def test_a_converted_model_resumes_exactly(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model is converted before `Trainer` loads a checkpoint.

    accelerate would convert the layers after that.
    """
    fp8_by_environment(monkeypatch)
    runs = []
    for folder in (None, str(tmp_path / "checkpoint-4")):
        model = llama()
        te.convert(model)
        run = trainer(model, device, tmp_path, save_strategy="steps", save_steps=4)
        run.train(resume_from_checkpoint=folder)
        runs.append(losses_of(run))
    assert len(runs[0]) == 8 and runs[0] == runs[1]


class ToyConfig(PretrainedConfig):
    model_type = "te_toy"


class Toy(PreTrainedModel):
    """A model of the transformers library that contains our layers."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(TOKENS, 32)
        self.layer = te.TransformerLayer(
            32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd"
        )
        self.norm = te.RMSNorm(32)
        self.head = te.Linear(32, TOKENS, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, because our layers have initialised themselves."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.embedding(ids))))


def test_models_of_our_layers_are_saved_and_loaded(device: str, tmp_path: Path) -> None:
    """FP8 state is saved, too, and no entry is missing or unexpected."""
    model = Toy(ToyConfig()).to(device).eval()
    ids = torch.randint(0, TOKENS, (2, LENGTH), device=device)
    with te.fp8_autocast(enabled=True):
        model(ids).sum().backward()
    model.save_pretrained(tmp_path)
    again, info = Toy.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    again.to(device).eval()
    for fp8 in (False, True):
        with torch.no_grad(), te.fp8_autocast(enabled=fp8):
            assert torch.equal(again(ids), model(ids))
    low = Toy.from_pretrained(tmp_path, dtype=torch.bfloat16).to(device)
    assert low(ids).dtype is torch.bfloat16
