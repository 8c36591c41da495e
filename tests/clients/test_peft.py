"""PEFT's LoRA on our Linear, LayerNormLinear and LayerNormMLP."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te

pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model

CLASSES = {
    "linear": lambda device: te.Linear(16, 32, device=device),
    "norm_linear": lambda device: te.LayerNormLinear(16, 32, device=device),
    "mlp": lambda device: te.LayerNormMLP(16, 48, device=device),
}


class Net(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm_linear = te.LayerNormLinear(16, 32, normalization="RMSNorm", device=device)
        self.linear = te.Linear(32, 16, bias=False, device=device)
        self.mlp = te.LayerNormMLP(16, 48, activation="swiglu", device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.linear(self.norm_linear(x)))


def with_lora(net: nn.Module) -> PeftModel:
    return get_peft_model(net, LoraConfig(r=4, target_modules=["norm_linear", "linear", "mlp"]))


def test_adapters_start_as_nothing_and_train(device: str) -> None:
    net = Net(device)
    plain = copy.deepcopy(net)
    adapted = with_lora(net)
    assert [type(m).__name__ for m in adapted.modules()].count("TeLinear") == 3
    x = torch.randn(3, 16, device=device)  # three tokens: FP8 pads them
    assert torch.equal(adapted(x), plain(x))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    te.gemm_report(reset=True)
    losses = []
    for _ in range(4):
        with te.fp8_autocast(enabled=True):
            loss = (adapted(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    gemms = te.gemm_report().counts
    assert {gemm for _, gemm, _ in gemms} == {"fprop", "dgrad"}  # frozen weights have no wgrad
    assert {kind for _, _, kind in gemms} == {"fp8"}
    frozen = {n: p for n, p in adapted.named_parameters() if not p.requires_grad}
    assert len(frozen) == 10 and all(p.grad is None for p in frozen.values())
    before = dict(plain.named_parameters())
    for name, parameter in frozen.items():
        original = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(parameter, before[original])


@pytest.mark.parametrize("kind", CLASSES)
def test_moves_and_copies(kind: str, device: str) -> None:
    """Adapters of layers that are built on the CPU, copied, moved, and cast to bf16."""
    torch.manual_seed(0)
    adapted = get_peft_model(
        nn.Sequential(CLASSES[kind]("cpu")), LoraConfig(r=4, target_modules=["0"])
    )
    adapted = copy.deepcopy(adapted).to(device).to(torch.bfloat16)
    x = torch.randn(3, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    with te.fp8_autocast(enabled=True):
        out = adapted(x)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert x.grad.isfinite().all()
    with adapted.disable_adapter():
        assert adapted(x).shape == out.shape


def test_adapters_are_saved_and_loaded(device: str, tmp_path: Path) -> None:
    net = Net(device)
    base = copy.deepcopy(net)
    adapted = with_lora(net)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path)
    x = torch.randn(16, 16, device=device)
    again = PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(again(x), adapted(x))
    assert not torch.equal(again(x), Net(device)(x))


def test_merging_is_refused_by_peft(device: str) -> None:
    with pytest.raises(NotImplementedError, match="does not support merge yet"):
        with_lora(Net(device)).merge_and_unload()
