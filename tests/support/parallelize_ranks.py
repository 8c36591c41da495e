"""What each rank of distributed/test_parallelize runs: a model of one process, and shared ones."""

import copy
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
from transformer_engine.common.recipe import DelayedScaling

WORDS, HIDDEN, TOKENS, BATCH = 64, 64, 16, 2
PLAN = {"embedding": "scatter", "norm": "tokens", "head": "column"}
BOUND = 2e-5  # of fp32 sums in another order, behind three steps


class Model(nn.Module):
    """Words, layers of every kind of projection, and the words that follow."""

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
        mesh: the ranks that share it; None for one process.
        sharded: behind `fully_shard`, over `mesh["dp"]`.
        options: of `parallelize`.
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
        """The loss, and the norm of the gradients."""
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
        """The largest difference of a parameter."""
        whole = dict(other.model.named_parameters())
        found = [
            te.distributed.gather_parameter(self.model, name) - whole[name]
            for name, _ in self.model.named_parameters()
        ]
        return max(float(x.abs().max()) for x in found)


def _mesh(*names: str) -> DeviceMesh:
    sizes = {"tp": 2, "cp": 2, "dp": 2}
    return init_device_mesh(here().type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def _close(shared: Trained, fp8: bool = False, bound: float = BOUND) -> None:
    alone = Trained()
    for number in range(3):
        expected, found = alone.step(number, fp8), shared.step(number, fp8)
        torch.testing.assert_close(found, expected, rtol=50 * bound, atol=0.0)
    assert shared.apart(alone) < 100 * bound, shared.apart(alone)


def tensor_parallel(rank: int) -> None:
    """Is the model of one process, and a copy of it is, too."""
    shared = Trained(_mesh("tp"))
    assert shared.model.layers[0].self_attention.proj.weight.shape == (HIDDEN, HIDDEN // 2)
    assert shared.model.layers[1].layernorm_mlp.fc1_weight.shape == (128, HIDDEN)
    copied = copy.deepcopy(shared.model)
    _close(shared)
    words = torch.zeros(TOKENS, BATCH, dtype=torch.long, device=here())
    assert copied(words).shape == (TOKENS, BATCH, WORDS // 2)


def sequence_parallel(rank: int) -> None:
    """Is the model of one process, with tokens in parts between its layers."""
    _close(Trained(_mesh("tp"), sequence_parallel=True))


def sequence_parallel_in_fp8(rank: int) -> None:
    """Is the model of one process, but for what FP8 rounds otherwise."""
    _close(Trained(_mesh("tp"), sequence_parallel=True), fp8=True, bound=2e-3)


def context_parallel(rank: int) -> None:
    """Is the model of one process, with a part of every sequence."""
    for comm_type in ("p2p", "a2a"):
        _close(Trained(_mesh("cp"), cp_comm_type=comm_type))


def checkpoints_of_other_layouts(rank: int) -> None:
    """Saved by two ranks that share layers; loaded by one process and `fully_shard`, and back."""
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
    """A file of one process loads into what ranks share, and gathers from it."""
    alone, shared = Trained(seed=2), Trained(_mesh("tp"))
    shared.model.load_state_dict(alone.model.state_dict())
    assert shared.apart(alone) == 0.0
    for name, x in shared.model.state_dict().items():
        whole = x.full_tensor() if hasattr(x, "full_tensor") else x
        assert torch.equal(whole, alone.model.state_dict()[name]), name


def what_cannot_be_shared(rank: int) -> None:
    """Is refused in words, and the model stays as it was."""

    class Own(te.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32, device="cpu")

    mesh = _mesh("tp")
    layer = te.TransformerLayer(48, 64, 3, device="cpu")
    model = nn.ModuleDict({"mlp": te.LayerNormMLP(32, 64, device="cpu"), "layer": layer})
    with te.quantized_model_init(enabled=True):
        fp8 = te.LayerNormMLP(32, 64, device="cpu")
    shared = te.parallelize(te.LayerNormMLP(32, 64, device="cpu"), mesh)
    for made, plan, text in (
        (model, {}, "num_attention_heads divisible by tp_size=2, got 3"),
        (nn.Sequential(Own()), {"0": "column"}, "Own, whose constructor is its own"),
        (nn.Sequential(fp8), {}, "fc1_weight in FP8 (module '0')"),
        (shared, {}, "one for several ranks"),
        (model, {"mpl": "layer"}, "got ['mpl'], which it does not have"),
        (model, {"mlp": "row"}, "that a LayerNormMLP can become, got 'row'"),
    ):
        try:
            te.parallelize(made, mesh, plan)
        except (ValueError, TypeError, NotImplementedError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"nothing was raised: {text}")
    assert model["mlp"].tp_size == 1


SCENARIOS = {
    run.__name__: run
    for run in (
        tensor_parallel,
        sequence_parallel,
        sequence_parallel_in_fp8,
        context_parallel,
        checkpoints_of_other_layouts,
        whole_checkpoints,
        what_cannot_be_shared,
    )
}


def scenarios(rank: int) -> dict[str, str]:
    """What each of them found wrong."""
    return failures(SCENARIOS, rank)
