"""Settings of modules that are set after construction apply from the next call."""

import copy
import pickle

import pytest
import torch
from debug_session import debugging, logged, section
from fused_layers import batch, build, is_fused
from precisions import scope
from rulers import assert_bitwise
from torch._dynamo.testing import CompileCounterWithBackend

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from transformer_engine.pytorch.chain import run_layer
from transformer_engine.pytorch.parallelize import remake

MLP = {"activation": "relu", "fuse_wgrad_accumulation": True}
NORM = {"eps": 10.0, "zero_centered_gamma": True}
TAP = {"return_layernorm_output": True}
SETTINGS = {
    te.LayerNorm: NORM,
    te.RMSNorm: NORM,
    te.Linear: {"fuse_wgrad_accumulation": True},
    te.LayerNormLinear: {**NORM, **TAP, "fuse_wgrad_accumulation": True},
    te.LayerNormMLP: {**NORM, **TAP, **MLP},
}
every_setting = pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in SETTINGS.items() for name in names]
)
precisions = pytest.mark.parametrize("precision", ["high precision", "delayed"])


def make(kind, **settings):
    sizes = (32,) if kind in (te.LayerNorm, te.RMSNorm) else (32, 64)
    torch.manual_seed(0)
    return kind(*sizes, device="cpu", **settings)


def step(module, precision, call=None):
    """The outputs, gradients and amax histories of a training step."""
    for parameter in module.parameters():
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with scope(precision):
        made = (module if call is None else call)(x)
    made = made if isinstance(made, tuple) else (made,)
    sum([(y * y).sum() for y in made]).backward()
    grads = [t for p in module.parameters() for t in (p.grad, p.main_grad)]
    return [*made, x.grad, *[g for g in grads if g is not None], *histories(module)]


def histories(module):
    module.state_dict()  # runs updates that compiled code has deferred
    return [s.amax_history.clone() for s in getattr(module, "scaling", {}).values()]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_bitwise(one, other)


@every_setting
@precisions
def test_is_that_of_the_next_call(kind, name, precision):
    """Results equal those of a module that was constructed with the setting."""
    value = SETTINGS[kind][name]
    late, made = make(kind), make(kind, **{name: value})
    step(late, precision)
    made.load_state_dict(late.state_dict())
    before = histories(late)
    setattr(late, name, value)
    assert_same(histories(late), before)
    assert getattr(late, name) == value
    assert_same(step(late, precision), step(made, precision))
    assert [*late.state_dict()] == [*made.state_dict()]


@every_setting
def test_of_the_same_value_keeps_plans(kind, name):
    module = make(kind, **{name: SETTINGS[kind][name]})
    step(module, "high precision")
    chain, plans = module.chain, dict(module._plans)
    setattr(module, name, SETTINGS[kind][name])
    assert module.chain is chain
    assert dict(module._plans) == plans != {}


@every_setting
@precisions
def test_is_that_of_copies(kind, name, precision):
    module = make(kind)
    step(module, precision)
    setattr(module, name, SETTINGS[kind][name])
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    expected = step(module, precision)
    for one in copies:
        assert_same(step(one, precision), expected)
        value = getattr(one, name)
        setattr(one, name, {"relu": "gelu", 10.0: 5.0, True: False}[value])
        assert getattr(module, name) == value
    chains = [module.chain, *[one.chain for one in copies]]
    assert len({id(chain) for chain in chains}) == 3


@every_setting
@precisions
def test_compiles_once_more(kind, name, precision):
    torch._dynamo.reset()
    eager, module = make(kind), make(kind)
    frames = CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, backend=frames, fullgraph=True)
    step(eager, precision), step(module, precision, call)
    compiled = frames.frame_count
    for one in (eager, module):
        setattr(one, name, SETTINGS[kind][name])
    torch.testing.assert_close(step(module, precision, call), step(eager, precision))
    again = frames.frame_count
    assert again > compiled
    setattr(module, name, SETTINGS[kind][name])
    step(module, precision, call)
    assert frames.frame_count == again


@pytest.mark.parametrize("compiled", [False, True])
@precisions
def test_inside_of_a_layer(precision, compiled, monkeypatch):
    def run(layer, call):
        results = []
        for setting in (None, "attention", "mlp"):
            if setting == "attention":
                layer.self_attention.layernorm_qkv.eps = 10.0
            if setting == "mlp":
                layer.layernorm_mlp.activation = "relu"
            for seed in range(2):
                x = batch(seed=seed)
                with scope(precision):
                    y = call(x)
                y.sum().backward()
                assert compiled or is_fused(y) is fuses
                results += [y, x.grad]
        return results

    torch._dynamo.reset()
    layer, fuses = build(), True
    first = run(layer, torch.compile(layer, backend="aot_eager") if compiled else layer)
    monkeypatch.setattr(run_layer, "_may_fuse", lambda x: False)
    fuses = False
    layer = build()
    assert_same(first, run(layer, layer))
    assert not torch.equal(first[0], first[4])
    assert not torch.equal(first[4], first[8])


def test_keeps_cached_weights_and_delayed_gradients():
    module = make(te.LayerNormMLP, delay_wgrad_compute=True)
    x = torch.randn(16, 32)
    with scope("current"):
        module(x, is_first_microbatch=True).sum().backward()
        module.eps = 1e-3
        cached = [matmul.cached_weight for matmul in module.chain.matmuls]
        with torch.no_grad():
            module.fc1_weight.zero_()
        assert module(x, is_first_microbatch=False).std() > 0
    assert None not in cached
    module.backward_dw()
    assert module.fc1_weight.grad.abs().max() > 0
    with pytest.raises(RuntimeError, match="expected a backward before each backward_dw"):
        module.eps = 1e-4
        module.backward_dw()
        module.backward_dw()


def test_keeps_names_and_hooks(tmp_path):
    module, seen = make(te.LayerNormMLP, name="old"), []
    module.name = "new"
    module.register_forward_hook(lambda *_: seen.append(1))
    with debugging(tmp_path, section("LogTensorStats", tensors=["activation"], stats=["max"])):
        for eps in (1e-5, 10.0):
            module.eps = eps
            module(torch.randn(16, 32))
            debug_api.step()
    names = {layer for _, layer, _ in logged(tmp_path)}
    assert names == {"new.fc1", "new.fc2"}
    assert len(seen) == 2


def test_values_that_cannot_be_change_nothing():
    module = make(te.LayerNormMLP, name="mlp")
    expected = step(module, "high precision")
    for name, value, error, text in (
        ("eps", "1", TypeError, r"\[LayerNormMLP\] expected eps to be a number, got '1'"),
        ("activation", "swiglu", ValueError, r"for the sizes of FC1, got 'swiglu' \(layer mlp\)"),
        ("activation", "none", NotImplementedError, "none"),
        ("activation", torch.nn.ReLU(), TypeError, "no parameter and no module, got ReLU .layer"),
        ("eps", torch.nn.Parameter(torch.ones(())), TypeError, "eps to be no parameter and no mod"),
        ("zero_centered_gamma", "no", TypeError, "zero_centered_gamma to be True or False, got 'n"),
        ("return_layernorm_output", "no", TypeError, r"True or False, got 'no' \(layer mlp\)"),
        ("normalization", "RMSNorm", ValueError, "expected normalization='LayerNorm' to stay"),
        ("delay_wgrad_compute", True, ValueError, "delay_wgrad_compute=False to stay, as the"),
    ):
        before = getattr(module, name)
        with pytest.raises(error, match=text):
            setattr(module, name, value)
        assert getattr(module, name) == before
    limited = make(te.LayerNormMLP, activation="clamped_swiglu", activation_params={"limit": 2.0})
    with pytest.raises(ValueError, match="activation_params"):
        limited.activation = "swiglu"
    assert limited.activation == "clamped_swiglu"
    assert_same(step(module, "high precision"), expected)
    with pytest.raises(TypeError, match=r"\[Linear\] expected save_original_input to be True or"):
        make(te.Linear).save_original_input = "no"


@pytest.mark.parametrize("name", ["return_layernorm_output", "return_bias"])
def test_results_that_a_layer_unpacks_stay(name):
    layer = build()
    for inside in (layer.self_attention.layernorm_qkv, layer.layernorm_mlp):
        before = getattr(inside, name)
        setattr(inside, name, before)
        with pytest.raises(ValueError, match=f"expected {name}={before} to stay"):
            setattr(inside, name, not before)


def test_mask_type_of_a_layer():
    layer, x = build(), batch()
    causal, whole = layer(x), layer(x, self_attn_mask_type="no_mask")
    assert not torch.equal(causal, whole)
    layer.self_attn_mask_type = "no_mask"
    assert torch.equal(layer(x), whole)
    assert torch.equal(layer(x, self_attn_mask_type="causal"), causal)
    with pytest.raises(ValueError, match="self_attn_mask_type"):
        layer.self_attn_mask_type = "none"
    assert torch.equal(copy.deepcopy(layer)(x), whole)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_residual_connection_post_layernorm", True),
        ("attn_input_format", "sbhd"),
        ("layer_type", "decoder"),
        ("output_layernorm", True),
        ("parallel_attention_mlp", True),
    ],
)
def test_what_the_blocks_of_a_layer_are_built_for_stays(name, value):
    layer = build()
    before = getattr(layer, name)
    with pytest.raises(ValueError, match=f"expected {name}={before!r} to stay"):
        setattr(layer, name, value)
    assert getattr(layer, name) == before


class SetsEarly(te.LayerNormLinear):
    def __init__(self, *sizes, **options):
        self.eps, self.sequence_parallel = 1.0, False
        super().__init__(*sizes, **options)


class SetsEarlyInGroups(te.GroupedLinear):
    def __init__(self, *sizes, **options):
        self.parallel_mode = None
        super().__init__(*sizes, **options)


def test_may_be_set_before_the_constructor_runs():
    assert make(SetsEarly, eps=10.0).eps == 10.0
    grouped = SetsEarlyInGroups(2, 32, 64, device="cpu")
    grouped.parallel_mode = "row"
    del grouped.parallel_mode
    assert not hasattr(grouped, "parallel_mode")


def test_that_was_deleted_is_that_of_the_next_call():
    module, made = make(te.LayerNormLinear), make(te.LayerNormLinear, eps=10.0)
    del module.eps
    assert not hasattr(module, "eps")
    with pytest.raises(TypeError, match="expected eps to be a number"):
        module.eps = "10"
    assert not hasattr(module, "eps")
    module.eps = 10.0
    assert_same(step(module, "high precision"), step(made, "high precision"))


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_output_of_the_norm_of_attention(attention_type):
    x = torch.randn(8, 2, 32)
    options = {"attention_type": attention_type, "attention_dropout": 0.0}
    options |= {"input_layernorm": True, "attn_mask_type": "no_mask", "device": "cpu"}
    torch.manual_seed(0)
    expected = te.MultiheadAttention(32, 4, return_layernorm_output=True, **options)
    torch.manual_seed(0)
    attention = te.MultiheadAttention(32, 4, **options)
    arguments = (x, None, x) if attention_type == "cross" else (x,)
    attention(*arguments)
    norm = "layernorm_qkv" if attention_type == "self" else "layernorm_query"
    getattr(attention, norm).return_layernorm_output = True
    assert_same(attention(*arguments), expected(*arguments))


def test_is_that_of_a_remade_layer():
    layer, x = build(), batch()
    layer.self_attention.layernorm_qkv.eps = 10.0
    layer.layernorm_mlp.activation = "relu"
    expected = layer(x)
    remake.become(layer, remake.counterpart("", layer, {}))
    assert_bitwise(layer(x), expected)


def test_epsilon_of_l2_normalization():
    module = te.ops.L2Normalization()
    x = torch.ones(2, 8)
    torch.testing.assert_close(module(x).norm(dim=-1), torch.ones(2))
    module.eps = 24.0
    torch.testing.assert_close(module(x), x / 32**0.5)


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_arguments_of_overlap_are_attributes(kind):
    module = make(kind, ub_overlap_ag=True, ub_bulk_wgrad=True, ub_name="fc1")
    assert module.ub_name == "fc1"
    assert module.ub_overlap_ag and module.ub_bulk_wgrad
    assert not (module.ub_overlap_rs or module.ub_bulk_dgrad or module.ub_overlap_rs_dgrad)
    assert not (module.ub_overlap_ag_fprop or module.ub_overlap_rs_fprop)  # there is only one rank
    assert not module.ub_overlap_ag_dgrad
    assert make(kind).ub_name is None
    assert te.GroupedLinear(1, 32, 64, device="cpu", ub_name="fc1").ub_name == "fc1"


class LearnsEpsilon(te.RMSNorm):
    """Has a parameter in place of a setting, and reads `_buffers` while attributes are set."""

    def __init__(self, size):
        super().__init__(size, device="cpu")
        self.eps = torch.nn.Parameter(torch.tensor(1e-5))

    def __setattr__(self, name, value):
        assert name not in self._buffers
        super().__setattr__(name, value)


class HasActivation(te.LayerNormMLP):
    """Has a module in place of a setting."""


def test_a_subclass_may_have_a_parameter_or_a_module_in_place_of_a_setting():
    assert dict(LearnsEpsilon(32).named_parameters()).keys() == {"weight", "eps"}
    module = make(HasActivation)
    module.activation = torch.nn.GELU()
    assert module.activation is module._modules["activation"]


class HasOwnLayout(te.TransformerLayer):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.layer_type = "sandwich"
        self.output_layernorm = torch.nn.LayerNorm(32)

    def forward(self, x):
        return self.output_layernorm(self.self_attention(x)[0])


class NamesNorm(te.LayerNormLinear):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.normalization = "that of the config"


def test_a_subclass_may_have_attributes_with_the_names_of_fixed_settings():
    x = torch.randn(4, 2, 32)
    layer = HasOwnLayout(32, 64, 4, device="cpu")
    assert layer(x).shape == x.shape and layer.layer_type == "sandwich"
    assert make(NamesNorm)(x).shape == make(te.LayerNormLinear)(x).shape


def test_replicas_have_settings_of_their_own():
    layer, x = build(), batch()
    with torch.no_grad():
        expected = layer(x)
        mlp = layer.layernorm_mlp
        replica = mlp._replicate_for_data_parallel()
        replica._parameters.update(mlp._parameters)
        replica.eps = 1.0
        assert not torch.equal(replica(x)[0], mlp(x)[0])
        assert torch.equal(layer(x), expected)
    assert mlp.eps != 1.0
