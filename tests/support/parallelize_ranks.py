"""What each rank of distributed/test_parallelize runs: models on ranks, beside one process."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attempts import failures
from rank_device import here
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling

WORDS, HIDDEN, TOKENS, BATCH = 64, 64, 16, 2
PLAN = {"embedding": "scatter", "norm": "tokens", "head": "column"}
BOUND = 2e-5  # of fp32 sums in another order, over three steps


class Model(nn.Module):
    """A small GPT: embedding, layers with every kind of projection, norm and head."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shared: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": here()}
        self.embedding = nn.Embedding(WORDS, HIDDEN, device=here())
        self.layers = nn.Sequential(
            te.TransformerLayer(HIDDEN, 128, 4, fuse_qkv_params=True, **shared),
            te.TransformerLayer(
                *(HIDDEN, 128, 4),
                num_gqa_groups=2,
                fuse_qkv_params=True,
                qkv_weight_interleaved=False,
                activation="swiglu",
                **shared,
            ),
            te.TransformerLayer(HIDDEN, 128, 4, output_layernorm=True, **shared),
        )
        self.norm = te.LayerNorm(HIDDEN, device=here())
        self.head = te.Linear(HIDDEN, WORDS, device=here(), name="head")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(words))))


class Trained:
    """A model with its optimizer.

    Args:
        mesh: the ranks that share the model; None for one process.
        sharded: apply `fully_shard` over `mesh["dp"]`.
        options: keyword arguments of `parallelize`.
    """

    def __init__(
        self, mesh: DeviceMesh | None = None, sharded: bool = False, seed: int = 1, **options: Any
    ) -> None:
        self.model, self.group, self.context = Model(seed), None, None
        names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
        if mesh is not None and {"tp", "cp"}.intersection(names):
            te.parallelize(self.model, mesh, PLAN, **options)
            self.group = mesh["tp"].get_group() if "tp" in names else None
            self.context = mesh["cp"].get_group() if "cp" in names else None
        if sharded:
            assert mesh is not None
            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int, fp8: bool = False) -> tuple[float, float]:
        """Returns the loss, and the norm of the gradients."""
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(WORDS, (TOKENS, BATCH), generator=generator).to(here())
        own, answers = (
            te.distributed.shard_sequence(x, self.context) for x in (words, words.roll(1, 0))
        )
        with te.fp8_autocast(enabled=fp8, fp8_recipe=DelayedScaling(amax_history_len=4)):
            logits = self.model(own)
        loss = te.parallel_cross_entropy(
            logits, answers, reduce_loss=True, dist_process_group=self.group
        )
        loss.backward()
        loss = loss.detach()
        te.all_reduce_sequence_parallel_grads(self.model)
        if self.context is not None:
            for x in (loss, *(p.grad for p in self.model.parameters())):
                dist.all_reduce(x, group=self.context)
                x.div_(dist.get_world_size(self.context))
        norm = te.distributed.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def states(self) -> dict[str, Any]:
        model, optimizer = te.distributed.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        dcp.save(self.states(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        states = self.states()
        dcp.load(states, checkpoint_id=path)
        te.distributed.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )

    def apart(self, other: "Trained") -> float:
        """Returns the largest difference of a parameter."""
        whole = dict(other.model.named_parameters())
        found = [
            te.distributed.gather_parameter(self.model, name) - whole[name]
            for name, _ in self.model.named_parameters()
        ]
        return max(float(x.abs().max()) for x in found)


def _mesh(*names: str) -> DeviceMesh:
    sizes = {"tp": 2, "cp": 2, "dp": 2}
    return init_device_mesh(here().type, tuple(sizes[name] for name in names), mesh_dim_names=names)


@functools.cache
def _alone(fp8: bool) -> tuple[Trained, list[tuple[float, float]]]:
    """Returns one process after three steps, and the results of its steps."""
    alone = Trained()
    return alone, [alone.step(number, fp8) for number in range(3)]


def _close(shared: Trained, fp8: bool = False, bound: float = BOUND) -> None:
    alone, steps = _alone(fp8)
    for number, expected in enumerate(steps):
        torch.testing.assert_close(shared.step(number, fp8), expected, rtol=50 * bound, atol=0.0)
    assert shared.apart(alone) < 100 * bound, shared.apart(alone)


def tensor_parallel(rank: int) -> None:
    """A tensor-parallel model agrees with one process, and so does a copy of it."""
    shared = Trained(_mesh("tp"))
    assert shared.model.layers[0].self_attention.proj.weight.shape == (HIDDEN, HIDDEN // 2)
    assert shared.model.layers[1].layernorm_mlp.fc1_weight.shape == (128, HIDDEN)
    copied = copy.deepcopy(shared.model)
    _close(shared)
    words = torch.zeros(TOKENS, BATCH, dtype=torch.long, device=here())
    assert copied(words).shape == (TOKENS, BATCH, WORDS // 2)


def sequence_parallel(rank: int) -> None:
    """A model whose tokens are sharded between layers agrees with one process."""
    _close(Trained(_mesh("tp"), sequence_parallel=True))


def sequence_parallel_in_fp8(rank: int) -> None:
    """In FP8, such a model agrees with one process up to differences of rounding."""
    _close(Trained(_mesh("tp"), sequence_parallel=True), fp8=True, bound=2e-3)


def context_parallel(rank: int) -> None:
    """A model that has a part of every sequence on each rank agrees with one process."""
    for comm_type in ("p2p", "a2a"):
        _close(Trained(_mesh("cp"), cp_comm_type=comm_type))


def tensor_and_context_parallel(rank: int) -> None:
    """Pairs of ranks share layers, other pairs share sequences: they agree with one process."""
    for comm_type in ("p2p", "all_gather"):
        shared = Trained(_mesh("cp", "tp"), sequence_parallel=True, cp_comm_type=comm_type)
        _close(shared)


def shards_of_shared_layers(rank: int) -> None:
    """With `fully_shard` over "dp", ranks agree with one process, in fp32 and (roughly) in FP8."""
    for fp8, bound in ((False, BOUND), (True, 2e-3)):
        _close(Trained(_mesh("dp", "tp"), True, sequence_parallel=True), fp8, bound)


def checkpoints_of_other_layouts(rank: int) -> None:
    """Saves from tensor-parallel ranks, loads into one process, then `fully_shard`, then ranks."""
    layouts: list[Callable[..., Trained]] = [
        lambda **seed: Trained(_mesh("tp"), sequence_parallel=True, **seed),
        Trained,
        lambda **seed: Trained(_mesh("dp"), sharded=True, **seed),
        lambda **seed: Trained(_mesh("tp"), **seed),
    ]
    alone = Trained()
    expected = [alone.step(number)[0] for number in range(4)]
    folder = [""]
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        found = []
        for number, make in enumerate(layouts):
            trained = make(seed=number + 1)
            if number:
                trained.load(Path(folder[0]) / str(number - 1))
            found.append(trained.step(number)[0])
            trained.save(Path(folder[0]) / str(number))
        dist.barrier()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)


def whole_checkpoints(rank: int) -> None:
    """A checkpoint of one process loads into a tensor-parallel model, and gathers from it."""
    alone, shared = Trained(seed=2), Trained(_mesh("tp"))
    shared.model.load_state_dict(alone.model.state_dict())
    assert shared.apart(alone) == 0.0
    for name, x in shared.model.state_dict().items():
        whole = x.full_tensor() if hasattr(x, "full_tensor") else x
        assert torch.equal(whole, alone.model.state_dict()[name]), name


def weights_in_fp8(rank: int) -> None:
    """Sharded FP8 weights keep bits and scales; they train, save and load as such."""
    for recipe in (DelayedScaling(), Float8BlockScaling()):
        with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            alone, shared, loaded, again = (_fp8_mlp(seed) for seed in (1, 1, 2, 3))
        mesh = _mesh("tp")
        for one in (shared, again):
            te.parallelize(one, mesh)
        for name, parameter in alone.named_parameters():
            found = te.distributed.gather_parameter(shared, name)
            assert torch.equal(found, parameter.detach()), name
        initial = shared.fc2_weight.get_high_precision_init_val()
        assert initial.shape == shared.fc2_weight.shape == (256, 128)
        assert torch.equal(
            initial, alone.fc2_weight.get_high_precision_init_val().chunk(2, 1)[rank]
        )
        optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (alone, shared)]
        for number in range(3):
            outs = [
                _trained(one, optimizer, recipe, number)
                for one, optimizer in zip((alone, shared), optimizers, strict=True)
            ]
            assert _apart(*outs) < 0.02, (recipe, number, _apart(*outs))
        state = shared.state_dict()
        with TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            dcp.save(state, checkpoint_id=folder[0])
            found = again.state_dict()
            dcp.load(found, checkpoint_id=folder[0])
            again.load_state_dict(found)
            dist.barrier()
        loaded.load_state_dict({k: _whole(x) for k, x in state.items()})
        for name, parameter in shared.named_parameters():
            found = te.distributed.gather_parameter(shared, name)
            assert torch.equal(found, dict(loaded.named_parameters())[name].detach()), name
            assert torch.equal(parameter, dict(again.named_parameters())[name]), name


def weights_in_fp8_that_are_cut_again(rank: int) -> None:
    """FP8 weights that `fully_shard` shards over the other dimension train, save and load."""
    sizes = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(here().type, sizes, mesh_dim_names=("dp", "tp"))
    with te.quantized_model_init():
        alone, shared, loaded = (_fp8_mlp(seed) for seed in (1, 1, 2))
    for one in (shared, loaded):
        te.parallelize(one, mesh)
        fully_shard(one, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (alone, shared)]
    for number in range(3):
        outs = [
            _trained(one, optimizer, DelayedScaling(), number)
            for one, optimizer in zip((alone, shared), optimizers, strict=True)
        ]
        assert _apart(*outs) < 0.02, (number, _apart(*outs))
    loaded.load_state_dict(shared.state_dict())
    for name, parameter in alone.named_parameters():
        found = te.distributed.gather_parameter(shared, name)
        assert _apart(found, parameter.detach()) < 0.1, name
        assert torch.equal(te.distributed.gather_parameter(loaded, name), found), name


def _fp8_mlp(seed: int) -> te.LayerNormMLP:
    torch.manual_seed(seed)
    return te.LayerNormMLP(256, 256, params_dtype=torch.bfloat16, device=here())


def _trained(model: nn.Module, optimizer: Any, recipe: Any, number: int) -> torch.Tensor:
    """Returns the output of a training step."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(TOKENS, BATCH, 256, generator=generator).to(here(), torch.bfloat16)
    with te.fp8_autocast(fp8_recipe=recipe):
        out = model(x)
    out.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach().float()


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class Experts(nn.Module):
    """Grouped layers: the sum of the ranks' outputs is the output of one process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = te.GroupedLinear(3, 32, 64, device=here())
        self.down = te.GroupedLinear(3, 64, 32, bias=False, device=here())

    def forward(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x, sizes)), sizes)


def experts(rank: int) -> None:
    """Compares a column-parallel and a row-parallel GroupedLinear, in fp32 and with FP8 weights."""
    sizes, x = [16, 0, 32], torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    for in_fp8 in (False, True):
        with te.quantized_model_init(in_fp8):
            alone, shared = Experts(), Experts()
        te.parallelize(shared, _mesh("tp"), {"up": "column", "down": "row"})
        assert shared.up.weight2.shape == shared.down.weight2.t().shape == (32, 32)
        outs = []
        for model in (alone, shared):
            with te.fp8_autocast(enabled=in_fp8, fp8_recipe=DelayedScaling()):
                out = model(x.to(here()), sizes)
            out.sum().backward()
            outs.append(out.detach())
        dist.all_reduce(outs[1])
        bound = 0.02 if in_fp8 else 1e-6
        assert _apart(outs[1], outs[0]) < bound
        for name, parameter in alone.named_parameters():
            grad = dict(shared.named_parameters())[name].grad
            found = te.distributed.gather_parameter(shared, name, grad)
            assert found.shape == parameter.grad.shape
            if parameter.grad.norm():
                assert _apart(found, parameter.grad) < 4 * bound, name
        shared.load_state_dict(alone.state_dict())
        for name, value in shared.state_dict().items():
            assert torch.equal(_whole(value), alone.state_dict()[name]), name


def what_cannot_be_shared(rank: int) -> None:
    """Modules that cannot be shared raise an error, and the model stays unchanged."""

    class Own(te.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32, device="cpu")

    mesh = _mesh("tp")
    layer = te.TransformerLayer(48, 64, 3, device="cpu")
    model = nn.ModuleDict({"mlp": te.LayerNormMLP(32, 64, device="cpu"), "layer": layer})
    shared = te.parallelize(te.LayerNormMLP(32, 64, device="cpu"), mesh)
    for made, plan, text in (
        (model, {}, "num_attention_heads divisible by tp_size=2, got 3"),
        (nn.Sequential(Own()), {"0": "column"}, "Own, whose constructor is its own"),
        (te.GroupedLinear(2, 32, 32, device="cpu"), {"": "row"}, "bias=False or return_bias=True"),
        (shared, {}, "one for several ranks"),
        (model, {"mpl": "layer"}, "got ['mpl'], which it does not have"),
        (model, {"mlp": "row"}, "that a LayerNormMLP can become, got 'row'"),
    ):
        try:
            te.parallelize(made, mesh, plan)
        except (ValueError, TypeError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"nothing was raised: {text}")
    assert model["mlp"].tp_size == 1


OF_FOUR = {
    run.__name__: run
    for run in (
        tensor_and_context_parallel,
        shards_of_shared_layers,
        weights_in_fp8_that_are_cut_again,
    )
}
SCENARIOS = {
    run.__name__: run
    for run in (
        *(tensor_parallel, sequence_parallel, sequence_parallel_in_fp8, context_parallel),
        *(checkpoints_of_other_layouts, whole_checkpoints),
        *(weights_in_fp8, weights_in_fp8_that_are_cut_again),
        *(experts, what_cannot_be_shared),
    )
}


def scenarios(rank: int) -> dict[str, str]:
    """Returns the traceback of each scenario that failed, "" where it passed."""
    return failures(SCENARIOS if dist.get_world_size() == 2 else OF_FOUR, rank)
