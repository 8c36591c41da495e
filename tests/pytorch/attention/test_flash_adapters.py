"""The adapters to flash-attn 2, 3 and 4, with stand-ins that have the documented signatures."""

from dataclasses import replace

import pytest
import torch
from cases import fake_flash_attn, fake_flash_backward
from cases.attention import module as make_module
from cases.attention import qkv as make_qkv
from cases.attention_factors import FACTORS, HAND_PICKED
from cases.attention_matrix import HEADS, check, pairwise
from torch.torch_version import TorchVersion

from transformer_engine.pytorch.attention import attention_backends
from transformer_engine.pytorch.attention import core_attention as core
from transformer_engine.pytorch.attention.backends import (
    choice,
    flash,
    flash2,
    flash3,
    flash4,
    unfused,
)
from transformer_engine.pytorch.attention.backends.backend import Problem, refusal
from transformer_engine.pytorch.attention.masks.masks import MASK_TYPES

VERSIONS = {
    "flash2": (flash2, "2.8.3"),
    "flash3": (flash3, "3.0.0b1"),
    "flash4": (flash4, "4.0.0b36"),
}
SIZE = 64  # of a head; all versions support it
PLAIN = {
    **FACTORS,
    "mask_type": [name for name in MASK_TYPES if name != "arbitrary"],
    "dtype": [torch.float16, torch.bfloat16],
    "bias": ["no_bias"],
    "bias_shape": [(3, HEADS)],
    "dropout": [0.0],
    "sizes": [(SIZE, SIZE)],
}
ONLY_VERSION_2 = {**PLAIN, "bias": ["alibi", "slopes"], "dropout": [0.0, 0.25]}
CASES = [*HAND_PICKED, *pairwise(PLAIN), *pairwise(ONLY_VERSION_2)]


def small_module(**changes):
    return make_module(kv_channels=SIZE, **changes)


def small_qkv(device="cpu"):
    return make_qkv(device, torch.bfloat16, shape=(5, 2, 4, SIZE))


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    """Chooses a version as if installed on a machine with a Hopper GPU; tensors stay on the CPU."""
    install(request.param, fake_flash_attn.module(request.param), monkeypatch)
    return request.param


@pytest.fixture(params=["flash2", "flash3"])
def package(request, monkeypatch):
    """The same with a stand-in that also has the private backward; `calls` records its calls."""
    package = fake_flash_backward.module(request.param)
    install(request.param, package, monkeypatch)
    return package


def install(version, package, monkeypatch):
    module, number = VERSIONS[version]
    monkeypatch.setattr(module.SOURCE, "version", TorchVersion(number))
    monkeypatch.setattr(module.KERNELS, "_module", package)

    def choose(*facts):
        problem = choice.problem_of(*facts)
        problem = problem._replace(device="cuda", capability=(9, 0))
        reason = refusal(module.BACKEND, problem, choice.environment())
        if reason is not None:
            pytest.skip(reason)
        return module.BACKEND

    monkeypatch.setattr(core, "choose", choose)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_definition(version, case):
    if version == "flash4":
        case = replace(case, size=SIZE, value_size=SIZE)
    check(case, "cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_private_backwards_against_definition(package, case):
    check(case, "cpu")
    assert len(package.calls) == (case.dropout == 0.0), "the random state of dropout is private"


@pytest.mark.parametrize("name", VERSIONS)
def test_a_package_that_cannot_be_imported_is_refused(name, monkeypatch):
    """For instance flash-attn 4 without cutlass. Only the first call warns."""
    module, number = VERSIONS[name]
    monkeypatch.setattr(module.SOURCE, "version", TorchVersion(number))
    monkeypatch.setattr(module.SOURCE, "module", "not_there.cute")
    monkeypatch.setattr(module.KERNELS, "_module", None)
    monkeypatch.setattr(module.KERNELS, "_failure", None)
    sizes = dict(dtype=torch.bfloat16, batch=2, queries=8, keys=8, heads=4, groups=4)
    problem = Problem(device="cuda", capability=(9, 0), key_size=SIZE, value_size=SIZE, **sizes)
    with pytest.warns(
        UserWarning, match="cannot be imported, so other attention runs: .*not_there"
    ):
        reason = refusal(module.BACKEND, problem, choice.environment())
    assert "cannot be imported: ModuleNotFoundError: No module named 'not_there'" in reason
    assert refusal(module.BACKEND, problem, choice.environment()) == reason


def test_heads_that_the_package_pads_are_differentiated_by_torch(package):
    check(replace(CASES[0], dtype=torch.bfloat16, size=20, value_size=20), "cpu")
    assert not package.calls


def test_parameters_of_torchs_custom_operators_are_known():
    """The operator is declared like those of flash-attn 2 and 3."""

    @torch.library.custom_op("tests::flash_backward", mutates_args=("dq",))
    def backward(q: torch.Tensor, dq: torch.Tensor, causal: bool = False) -> None:
        dq.copy_(q)

    assert flash._parameters(backward) == ({"q", "dq", "causal"}, {"q", "dq"})
    assert flash._accepts(backward, frozenset(("q", "dq")))
    assert not flash._accepts(backward, frozenset(("q", "dq", "window")))
    assert not flash._accepts(backward, frozenset(("q", "causal")))
    assert not flash._accepts(None, frozenset(("q",)))


def test_dropout_and_determinism_reach_the_kernel(version, monkeypatch):
    module, _ = VERSIONS[version]
    said = {}
    kernel = module.KERNELS.module.flash_attn_func

    def record(*args, **keywords):
        said.update(keywords)
        return kernel(*args, **keywords)

    monkeypatch.setattr(module.KERNELS.module, "flash_attn_func", record)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    p = 0.5 if version == "flash2" else 0.0
    small_module(attention_dropout=p)(*small_qkv())
    assert said["deterministic"] is True
    assert said.get("dropout_p", 0.0) == p
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    small_module()(*small_qkv())
    assert said["deterministic"] is False


@pytest.mark.filterwarnings("ignore:Argument .* cannot be converted to a JitArgument")
@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks_reach_version_4(monkeypatch, device, kind):
    """On the CPU with the stand-in, on a GPU with the package itself."""
    if device == "cpu":
        monkeypatch.setattr(flash4.KERNELS, "_module", fake_flash_attn.module("flash4"))
    elif reason := attention_backends(device=device)["flash4"]:
        pytest.skip(f"flash4 {reason}")
    inputs = small_qkv(device)
    results = []
    for backend in (flash4.BACKEND, unfused.BACKEND):
        monkeypatch.setattr(core, "choose", lambda *call, backend=backend: backend)
        module = small_module(softmax_type=kind).to(device)
        wanted = list(inputs)
        if kind == "learnable":
            torch.nn.init.constant_(module.softmax_offset, 0.7)
            wanted.append(module.softmax_offset)
        out = module(*inputs)
        results.append((out, *torch.autograd.grad(out.sum(), wanted)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
@pytest.mark.parametrize("real", ["last", "scattered"])
def test_padding_may_be_anywhere_in_a_mask(version, monkeypatch, mask_type, real):
    """For instance before a prompt. Results must equal those of the unfused backend."""
    hidden = {"last": [1, 1, 0, 0, 0], "scattered": [0, 1, 0, 1, 0]}[real]
    hidden = torch.tensor([hidden, [0, 0, 0, 0, 1]], dtype=torch.bool).view(2, 1, 1, 5)
    module, inputs = small_module(attn_mask_type=mask_type), small_qkv()
    out = module(*inputs, hidden)
    gradients = torch.autograd.grad(out.sum(), inputs)
    monkeypatch.setattr(core, "choose", lambda *call: unfused.BACKEND)
    expected = module(*inputs, hidden)
    pairs = zip(gradients, torch.autograd.grad(expected.sum(), inputs), strict=True)
    for ours, theirs in ((out, expected), *pairs):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_packed_calls_without_sequences(version):
    """flash-attn refuses them, so that another backend runs."""
    module = make_module(qkv_format="thd", attn_mask_type="padding_causal")
    nothing = torch.zeros(1, dtype=torch.int32)
    inputs = make_qkv(dtype=torch.bfloat16, shape=(0, 4, 8))
    with pytest.raises(pytest.skip.Exception, match="at least one query"):
        module(*inputs, cu_seqlens_q=nothing, cu_seqlens_kv=nothing)


def test_variables_switch_versions_off(version, monkeypatch):
    kind = {"device": "cuda"}
    assert "NVTE" not in str(attention_backends(**kind)[version])
    monkeypatch.setenv(f"NVTE_FLASH_ATTN_V{version[-1]}", "0")
    assert f"NVTE_FLASH_ATTN_V{version[-1]}=0" in attention_backends(**kind)[version]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.delenv(f"NVTE_FLASH_ATTN_V{version[-1]}")
    assert "NVTE_FLASH_ATTN=0" in attention_backends(**kind)[version]


def test_an_old_version_says_so(monkeypatch):
    monkeypatch.setattr(flash2.SOURCE, "version", TorchVersion("2.3.6"))
    reason = attention_backends(device="cuda")["flash2"]
    assert (
        reason
        == "the installed flash-attn is older than 2.4.1; python -m pip install -U flash-attn"
    )


def test_a_version_that_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(flash4.SOURCE, "version", None)
    reason = attention_backends(device="cuda")["flash4"]
    assert reason == "flash-attn-4 is not installed; python -m pip install flash-attn-4"
