"""`parameters_split`: several named parameters in place of one weight and one bias."""

import pytest
import torch

import transformer_engine.pytorch as te


def names(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("split", "sizes"),
    [(("query_", "key", "value_"), [16, 16, 16]), ({"q": 32, "kv": 16}, [32, 16])],
)
def test_parameters_split(split, sizes) -> None:
    module = te.Linear(32, 48, parameters_split=split, device="cpu")
    parts = [name.rstrip("_") for name in split]
    expected = [f"{part}_{kind}" for kind in ("weight", "bias") for part in parts]
    assert list(names(module)) == expected
    assert [names(module)[f"{part}_weight"][0] for part in parts] == sizes
    x = torch.randn(4, 32)
    weight = torch.cat([getattr(module, f"{part}_weight") for part in parts])
    torch.testing.assert_close(module(x), x @ weight.T)
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_one_main_grad_needs_one_weight(kind) -> None:
    split = {"parameters_split": ("q", "k"), "device": "cpu", "name": "fc"}
    text = r"one weight with fuse_wgrad_accumulation=True, got .* q_weight, k_weight \(layer fc\)"
    with pytest.raises(ValueError, match=text):
        kind(16, 32, fuse_wgrad_accumulation=True, **split)
    with pytest.raises(ValueError, match=text):
        kind(16, 32, **split).fuse_wgrad_accumulation = True


def test_parameters_split_that_does_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"add up to out_features=48, got \{'q': 32, 'k': 8\}"):
        te.Linear(32, 48, parameters_split={"q": 32, "k": 8}, device="cpu")
    with pytest.raises(ValueError, match="out_features=50 to be divisible among"):
        te.Linear(32, 50, parameters_split=("a", "b", "c"), device="cpu")


@pytest.mark.parametrize("split", [("a_", "a"), {"a": 24, "a_": 24}, ("a", "_"), ("a.b", "c")])
def test_parameters_split_of_names_that_cannot_be(split) -> None:
    with pytest.raises(ValueError, match=r"^\[Linear\] expected names in parameters_split that"):
        te.Linear(32, 48, parameters_split=split, device="cpu")


@pytest.mark.parametrize("split", [5, "ab", (1, 2), {0: 48}, True])
def test_parameters_split_that_is_none(split) -> None:
    with pytest.raises(TypeError, match=r"^\[Linear\] expected parameters_split to be names, or"):
        te.Linear(32, 48, parameters_split=split, device="cpu")


def test_parameters_split_that_takes_the_name_of_another_parameter() -> None:
    text = r"different names, got two called 'layer_norm_weight' \(layer fc\)"
    with pytest.raises(ValueError, match=text):
        te.LayerNormLinear(32, 48, parameters_split=("layer_norm", "b"), device="cpu", name="fc")


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_errors_about_a_split_parameter_name_it(kind) -> None:
    module = kind(32, 48, parameters_split=("a", "b"), device="cpu", params_dtype=torch.bfloat16)
    if kind is te.LayerNormLinear:
        module.layer_norm_weight.data = module.layer_norm_weight.float()
        module.layer_norm_bias.data = module.layer_norm_bias.float()
    with pytest.raises(TypeError, match=r"got torch\.bfloat16 for a_weight"):
        module(torch.randn(16, 32))
    module.to(torch.float32).b_bias.data = module.b_bias.double()
    with pytest.raises(TypeError, match=r"got torch\.float64 for b_bias"):
        module(torch.randn(16, 32))
