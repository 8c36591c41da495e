"""te.convert: which layers are replaced, why others stay, and that nothing else changes."""

import copy

import pytest
import torch
from cases.convertible import GPT, Mixed, encoder_layer, norm_linear
from module_reference import sqnr
from rulers import assert_bitwise
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

# Smallest allowed SQNR of outputs in dB; gradients may have 10 dB less. The bound of fp32 on a GPU
# also allows products in TF32.
HIGH = {
    ("cpu", torch.float32): 110,
    ("cuda", torch.float32): 55,
    ("cpu", torch.bfloat16): 40,
    ("cuda", torch.bfloat16): 40,
}


def names_of(report):
    return {one.path: (one.before, one.after) for one in report.replaced}


def reasons_of(report):
    return {one.path: one.reason for one in report.left}


def gradients(model, x):
    model.zero_grad()
    out = model(x)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out.float() * towards.to(out.device)).mean().backward()
    return out.detach(), [p.grad for p in model.parameters()]


def assert_same_results(model, other, x, decibels):
    (out, grads), (wanted, wanted_grads) = gradients(model, x), gradients(other, x)
    assert sqnr(out, wanted) > decibels
    for got, want in zip(grads, wanted_grads, strict=True):
        assert sqnr(got, want) > decibels - 10


MODELS = {
    "gpt": (lambda: GPT(vocabulary=64, width=32), lambda: torch.randint(64, (2, 16))),
    "encoder_layer": (encoder_layer, lambda: torch.randn(2, 16, 32)),
    "norm_linear": (norm_linear, lambda: torch.randn(2, 16, 32)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_results_stay_in_high_precision(device, kind, dtype):
    build, draw = MODELS[kind]
    model = build().to(device, dtype)
    x = draw().to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    plain = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    report = te.convert(model)
    assert len(report.replaced) >= 2
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters.values()}
    assert_same_results(model, plain, x, HIGH[device, dtype])
    with torch.no_grad():
        assert sqnr(model.eval()(x), plain.eval()(x)) > HIGH[device, dtype]
    model.train()
    plain.train()

    te.convert(model, to="torch")
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    out, wanted = model(x), plain(x)
    assert_bitwise(out, wanted)


@pytest.mark.parametrize("kind", MODELS)
def test_fp8_under_autocast(device, kind):
    build, draw = MODELS[kind]
    model = build().to(device)
    x = draw().to(device)
    plain = copy.deepcopy(model)
    report = te.convert(model)
    te.gemm_report(reset=True)
    with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
        out, _ = gradients(model, x)
    wanted, _ = gradients(plain, x)
    assert sqnr(out, wanted) > 15
    assert not torch.equal(out, wanted)
    linears = [one.path for one in report.replaced if one.after.endswith("Linear")]
    counted = str(te.gemm_report())
    for path in linears:
        assert path in counted


class Transposed(nn.Module):
    """A linear layer whose weight is `[in, out]`, like `Conv1D` of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))


def test_other_layers_with_a_matrix_are_noted():
    others = (nn.Embedding(8, 32), nn.LazyConv1d(4, 3), torch.jit.script(nn.Linear(32, 32)))
    model = nn.Sequential(nn.Linear(32, 32), Transposed(), Transposed(), *others)
    (note,) = te.convert(model).notes
    assert note.startswith("Transposed stays (2 of them, the first is 1): it has a matrix")
    assert te.convert(model, to="torch").notes == ()
    (note,) = te.convert(model, exclude="1").notes
    assert note.startswith("Transposed stays (1 of them, the first is 2)")


def test_keys_stay_without_fusing():
    model = nn.Sequential(encoder_layer(), norm_linear())
    before = model.state_dict()
    te.convert(model, fuse=False)
    keys = [key for key in model.state_dict() if not key.endswith("_extra_state")]
    assert keys == list(before)
    other = nn.Sequential(encoder_layer(), norm_linear())
    model.load_state_dict(other.state_dict())  # strict: an error if a key is missing
    for key, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def test_fused_norm_stands_at_the_place_of_the_linear():
    model = norm_linear()
    parameters = dict(model.named_parameters())
    report = te.convert(model)
    assert names_of(report) == {
        "0": ("nn.LayerNorm", "te.NormInNext"),
        "1": ("nn.Linear", "te.LayerNormLinear"),
        "3": ("nn.RMSNorm", "te.NormInNext"),
        "4": ("nn.Linear", "te.LayerNormLinear"),
    }
    assert model[1].layer_norm_weight is parameters["0.weight"]
    assert model[1].layer_norm_bias is parameters["0.bias"]
    assert model[4].layer_norm_weight is parameters["3.weight"]
    assert model[4].weight is parameters["4.weight"]
    assert model[4].eps == 1e-6


class Residual(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + self[0](x)


def _watched():
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16))
    model[0].register_forward_hook(lambda module, args, out: None)
    return model


def _norm_used_twice():
    norm = nn.LayerNorm(32)
    return nn.ModuleList([nn.Sequential(norm, nn.Linear(32, 16)), nn.Sequential(norm)])


NOT_FUSIBLE = {
    "subclass": lambda: Residual(nn.LayerNorm(32), nn.Linear(32, 32)),
    "list": lambda: nn.ModuleList([nn.LayerNorm(32), nn.Linear(32, 16)]),
    "between": lambda: nn.Sequential(nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16)),
    "hook": _watched,
    "shared": _norm_used_twice,
    "sizes": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(48, 16)),
    "dtypes": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16).bfloat16()),
    "linear stays": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 10)),
}


@pytest.mark.parametrize("case", NOT_FUSIBLE)
def test_norms_that_others_see_are_not_fused(case):
    model = NOT_FUSIBLE[case]()
    te.convert(model)
    assert not any(isinstance(module, te.LayerNormLinear) for module in model.modules())


def test_what_stays_and_why():
    model = Mixed()
    report = te.convert(model)
    reasons = reasons_of(report)
    assert set(names_of(report)) == {"plain", "norm", "shared_a", "shared_b"}
    expected = {
        "odd": "sizes 32 -> 10: FP8 needs multiples of 16",
        "subclass": "Scaled is a subclass of nn.Linear",
        "patched": "its forward was replaced",
        "tied": "its parameter is tied to embedding.weight",
        "hooked": "it has forward_pre_hooks",
        "parametrized": "its weight is parametrized",
        "old_weight_norm": "it has forward_pre_hooks, state_dict_hooks, load_state_dict_pre_hooks",
        "more": "it holds more than its class does: mask",
        "double": "dtype torch.float64: expected float32, float16 or bfloat16",
        "no_affine": "it has no weight (elementwise_affine=False)",
        "no_bias": "it has no bias",
        "half_eps": "eps=None depends on the version of torch for torch.bfloat16: give a number",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is a subclass of nn.Linear",
        "clash": "attributes that were set on it mean something else there: chain",
        "flat": "its weight is not of shape (32, 32)",
        "lazy": "LazyLinear is a subclass of nn.Linear",
    }
    assert reasons == expected
    assert model.shared_a is model.shared_b


def test_report_is_a_table():
    text = str(te.convert(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))))
    assert text.splitlines() == [
        "replaced 1, left 1",
        "",
        "replaced  was        is",
        "0         nn.Linear  te.Linear",
        "",
        "left  kind       why",
        "2     nn.Linear  sizes 64 -> 10: FP8 needs multiples of 16",
    ]


@pytest.mark.parametrize(
    ("include", "exclude", "replaced"),
    [
        (None, "^1$", {"0", "2"}),
        ("[01]", None, {"0", "1"}),
        (["0", "2"], ["2"], {"0"}),
        ("^$", None, set()),
    ],
)
def test_patterns_choose_paths(include, exclude, replaced):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    report = te.convert(model, include, exclude)
    assert set(names_of(report)) == replaced
    for path, reason in reasons_of(report).items():
        assert reason in ("not included", f"excluded by {exclude!r}", "excluded by '2'"), path


def test_patterns_without_effect_are_said():
    report = te.convert(nn.Sequential(nn.Linear(32, 32)), exclude=["lm_haed", "0"])
    assert report.notes == ("the pattern 'lm_haed' is found in the path of no layer",)
    assert "note: the pattern 'lm_haed'" in str(report)


def test_fused_path_of_torch_is_said():
    model = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    report = te.convert(model)
    assert len(report.notes) == 1
    assert "layers.0: in eval mode" in report.notes[0]
    assert te.convert(model, to="torch").notes == ()


def test_state_of_a_layer_travels():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).eval())
    model[0].weight.requires_grad_(False)
    model[0].scale_of_init = 0.5
    before = torch.get_rng_state()
    te.convert(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model[0].weight.requires_grad and model[0].bias.requires_grad
    assert (model[0].training, model[1].training) == (True, False)
    assert model[0].scale_of_init == 0.5
    te.convert(model, to="torch")
    assert model[0].scale_of_init == 0.5
    assert (model[0].training, model[1].training) == (True, False)


def test_optimizers_keep_working():
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.LayerNorm(32))
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    te.convert(model)
    x = torch.randn(8, 32)
    for _ in range(3):
        gradients(model, x)
        gradients(plain, x)
        optimizer.step()
        other.step()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want)


def test_copies_are_independent():
    model = GPT(vocabulary=64, width=32)
    te.convert(model)
    twin = copy.deepcopy(model)
    tokens = torch.randint(64, (1, 16))
    assert_bitwise(twin(tokens), model(tokens))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert not torch.equal(twin(tokens), model(tokens))
    back = te.convert(twin, to="torch")
    assert back.replaced
    assert any(isinstance(module, te.Linear) for module in model.modules())


def test_meta_models_start_as_torch_starts_them():
    def start(model):
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return list(model.parameters())

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    plain = copy.deepcopy(model)
    te.convert(model, fuse=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    for got, want in zip(start(model), start(plain), strict=True):
        assert_bitwise(got, want)


def test_a_converted_model_is_saved_whole(tmp_path):
    model = norm_linear()
    te.convert(model)
    torch.save(model, tmp_path / "model.pt")
    x = torch.randn(4, 32)
    assert_bitwise(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))


def test_back_to_torch_leaves_what_has_no_counterpart():
    model = nn.ModuleDict(
        {
            "linear": te.Linear(32, 32, device="cpu"),
            "bias": te.Linear(32, 32, device="cpu", return_bias=True),
            "split": te.Linear(32, 32, device="cpu", parameters_split=["a", "b"]),
            "wgrad": te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=True),
            "centered": te.RMSNorm(32, device="cpu", zero_centered_gamma=True),
            "fused": te.LayerNormLinear(32, 32, device="cpu"),
            "layer": te.TransformerLayer(32, 64, 2, device="cpu"),
        }
    )
    report = te.convert(model, to="torch")
    assert names_of(report) == {"linear": ("te.Linear", "nn.Linear")}
    reasons = reasons_of(report)
    assert reasons["layer.self_attention.proj"] == "it is a part of te.TransformerLayer"
    assert {k: v for k, v in reasons.items() if not k.startswith("layer")} == {
        "bias": "return_bias=True has no counterpart",
        "split": "it has no parameter `weight`: it is split, computed or wrapped",
        "wgrad": "fuse_wgrad_accumulation=True has no counterpart",
        "centered": "zero_centered_gamma=True has no counterpart",
        "fused": "it has no one counterpart in torch",
    }
    assert not te.convert(te.TransformerLayer(32, 64, 2, device="cpu"), to="torch").replaced


def test_rms_norm_without_eps_is_that_of_torch():
    model = nn.Sequential(nn.RMSNorm(32))
    x = 1e-4 * torch.randn(4, 32)
    wanted = model(x)
    assert te.convert(model).replaced
    torch.testing.assert_close(model(x), wanted)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got int"):
        te.convert(5)
    with pytest.raises(ValueError, match=r"expected to='te' or to='torch', got 'jax'"):
        te.convert(nn.Sequential(), to="jax")
    with pytest.raises(ValueError, match="expected a regular expression for exclude, got '\\['"):
        te.convert(nn.Sequential(), exclude="[")
    with pytest.raises(ValueError, match="got a Linear itself"):
        te.convert(nn.Linear(16, 16))


def test_a_converted_model_compiles():
    model = norm_linear()
    te.convert(model)
    x = torch.randn(16, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x), model(x))


def test_an_empty_model():
    assert str(te.convert(nn.Sequential())) == "replaced 0, left 0"
