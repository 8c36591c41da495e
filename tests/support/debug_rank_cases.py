"""What each rank of distributed/test_debug_ranks runs: debugger sessions of layers on two ranks."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from debug_session import Logged, debugging, inspect, logged, section
from rank_device import here
from statistics_reference import ALL
from torch.distributed.device_mesh import init_device_mesh

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from nvdlfw_inspect.report.records import read_run
from nvdlfw_inspect.report.table import table_of
from nvdlfw_inspect.report.verdicts import judge
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

Outcome = Any
TOKENS, FEATURES = 32, 48
SEEN = ["activation", "gradient", "output", "dgrad", "weight"]
FP8 = ["underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse"]
LOOK = [
    section("LogTensorStats", tensors=SEEN, stats=list(ALL)),
    section("LogFp8TensorStats", tensors=SEEN[:2], stats=FP8),
]
SOLO: list[Any] = []


def solo(rank: int) -> Any:
    """Returns the group of this rank alone. Both ranks must call this."""
    if not SOLO:
        SOLO.extend(dist.new_group([other]) for other in range(2))
    return SOLO[rank]


def short_group() -> Any:
    """Returns a group of both ranks with a timeout of one second."""
    return dist.new_group([0, 1], timeout=timedelta(seconds=1))


def half(x: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    """Returns this rank's half of `x`."""
    return x.chunk(2, dim=dim)[rank].contiguous()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and gradients; some are too small for FP8, and the second half is larger."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.where(torch.arange(TOKENS) < TOKENS // 2, 1.0, 10.7)[:, None]
    found = []
    for _ in range(2):
        values = torch.randn(TOKENS, FEATURES, generator=generator)
        powers = torch.randint(-26, 1, (TOKENS, FEATURES), generator=generator)
        found.append((values * sizes * 2.0**powers).to(here()))
    return found[0], found[1]


def build(name: str = "layer") -> te.Linear:
    torch.manual_seed(3)
    return te.Linear(FEATURES, FEATURES, bias=False, device=here(), name=name)


def train(layer: Any, recipe: Any, part: slice = slice(None), steps: int = 2) -> list[torch.Tensor]:
    """Trains on `part` of the tokens, and returns outputs and input gradients."""
    found = []
    for step in range(steps):
        x, grad = (t[part].contiguous() for t in batch(step))
        x.requires_grad_()
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = layer(x)
        y.backward(grad)
        debug_api.step()
        found += [y.detach().cpu(), x.grad.cpu()]
    return found


def part_of(rank: int) -> slice:
    return slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)


def halves_and_whole(rank: int, folder: Path) -> dict[str, tuple[Logged, Logged]]:
    """Logs a batch that two ranks share, and the same batch on one rank."""
    outcome = {}
    for name, recipe in {
        "bf16": None,
        "delayed": DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4),
    }.items():
        for kind in ("halves", "whole"):
            with debugging(folder / name / kind, *LOOK[: 1 if recipe is None else 2]):
                if kind == "whole":
                    debug_api.set_tensor_reduction_group(solo(rank))
                train(build(), recipe, part_of(rank) if kind == "halves" else slice(None))
        kinds = (folder / name / kind for kind in ("halves", "whole"))
        outcome[name] = tuple(logged(kind, rank) for kind in kinds)
    return outcome


def fp8_of_each(rank: int, folder: Path) -> tuple[Logged, Logged]:
    """Ranks with a scale each: returns what they log as one group, and what each logs alone."""
    for kind in ("together", "alone"):
        with debugging(folder / kind, section("LogFp8TensorStats", tensors=SEEN[:2], stats=FP8)):
            if kind == "alone":
                debug_api.set_tensor_reduction_group(solo(rank))
            train(build(), Float8CurrentScaling(), part_of(rank))
    return logged(folder / "together", rank), logged(folder / "alone", rank)


def shards(rank: int, folder: Path) -> dict[str, tuple[Logged, Logged]]:
    """Logs tensors that a tensor-parallel group shards, whose cast needs the amax of all shards."""
    x = batch(0)[0]
    what_if = [f"fp8_current_scaling_{statistic}" for statistic in FP8]
    config = [
        section("LogFp8TensorStats", tensors=[*SEEN[:2], "weight"], stats=what_if),
        section("LogTensorStats", tensors=["weight"], stats=list(ALL)),
    ]
    together = {"tp_group": dist.new_group([0, 1]), "tp_size": 2}
    for kind, part, more in (("shards", half(x, rank), together), ("whole", x, {})):
        with debugging(folder / kind, *config):
            if kind == "whole":
                debug_api.set_tensor_reduction_group(solo(rank))
            for tensor in ("activation", "weight"):
                inspect("layer", tensor, part, **more)
            debug_api.step()
    return logged(folder / "shards", rank), logged(folder / "whole", rank)


def copies(rank: int, folder: Path) -> Logged:
    """Logs an activation that both tensor-parallel ranks hold; its elements must count once."""
    with debugging(folder, LOOK[0]):
        statistics = debug_api.DEBUG_MANAGER.statistics
        tp_group = dist.new_group([0, 1])
        x = batch(0)[0]
        found = statistics.tensor("layer", "activation", x.device, tp_group, 2, replicated=True)
        found.feed_moments(x)
        debug_api.step()
    return logged(folder, rank)


def modified(rank: int, folder: Path) -> dict[str, list[Any]]:
    """Returns results with features that modify tensors: shared group, own group, whole batch."""
    features = {
        "FakeQuant": ({"quant_format": "FP8E4M3"}, None),
        "PerTensorScaling": ({}, DelayedScaling(amax_history_len=4)),
    }
    outcome: dict[str, list[Any]] = {}
    both = dist.new_group([0, 1])
    for name, (keys, recipe) in features.items():
        gemms = [
            {"gemm": "fprop", "tensors": ["activation", "weight"]},
            {"gemm": "dgrad", "tensors": ["gradient"]},
        ]
        config = section(name, gemms_struct=gemms, **keys)
        for kind, group, part in (
            ("shared", both, part_of(rank)),
            ("own", solo(rank), part_of(rank)),
            ("whole", solo(rank), slice(None)),
        ):
            with debugging(folder / name / kind, config):
                debug_api.set_tensor_reduction_group(group)
                found = train(build(), recipe, part)
            if kind == "whole":
                found = [x[part_of(rank)] for x in found]
            outcome.setdefault(name, []).append(found)
    return outcome


def pipeline(rank: int, folder: Path) -> Logged:
    """Logs pipeline stages: each rank has its own layer and its own reduction group."""
    with debugging(folder, LOOK[0]):
        debug_api.set_tensor_reduction_group(solo(rank))
        train(build(f"stage{rank}"), None)
    return logged(folder, rank)


def meshes_and_other_groups(rank: int, folder: Path) -> tuple[bool, list[str]]:
    """Whether a mesh can set the reduction group, and the errors for groups that are refused."""
    mesh = init_device_mesh(here().type, (1, 2), mesh_dim_names=("dp", "tp"))
    said = []
    with debugging(folder, LOOK[0]):
        debug_api.set_tensor_reduction_group(mesh["tp"])
        same = debug_api.get_tensor_reduction_group() is mesh.get_group("tp")
        for group in (solo(1 - rank), mesh):
            try:
                debug_api.set_tensor_reduction_group(group)
            except (ValueError, TypeError) as error:
                said.append(str(error))
    return same, said


def experts(rank: int, folder: Path) -> Logged:
    """Logs experts: both ranks have all layers, but some layers run on one rank first."""
    with debugging(folder, section("LogTensorStats", tensors=["activation"], stats=list(ALL))):
        model = torch.nn.ModuleList([te.Linear(16, 16, device=here()) for _ in range(3)])
        debug_api.infer_and_assign_layer_names(model)
        runs = {0: (0, 1), 1: (0, 1, 2), 2: (0, 1, 2)} if rank == 0 else {0: (0,), 1: (0,), 2: (1,)}
        for step in range(3):
            for index in runs[step]:
                model[index](torch.full((4, 16), float(1 + index + 10 * rank), device=here()))
            debug_api.step()
    return logged(folder, rank)


def evaluation(rank: int, folder: Path) -> Logged:
    """Rank 0 runs a forward in eval mode between two steps. It counts in neither step."""
    with debugging(folder, section("LogTensorStats", tensors=["activation"], stats=["l1_norm"])):
        layer = te.Linear(16, 16, device=here(), name="layer")
        for step in range(2):
            for _ in range(1 + step + rank):  # micro-batches
                layer(torch.ones(4, 16, device=here()))
            if rank == 0 and step:
                with torch.no_grad():
                    layer.eval()(torch.ones(4, 16, device=here()))
            debug_api.step()
    return logged(folder, rank)


def files_and_summary(rank: int, folder: Path) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the files that two ranks write, and the summary table of them."""
    config = section("LogTensorStats", tensors=["activation", "weight"], stats=["max"])
    with debugging(folder, config):
        layer = te.Linear(16, 16, device=here(), name="layer")
        torch.nn.init.constant_(layer.weight, float(1 + rank))
        layer(torch.full((4, 16), float(rank), device=here()))
        debug_api.step()
    dist.barrier()
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    rows = table_of(judge(read_run(folder))).rows
    return names, [list(row[1:6]) for row in rows]


def _ends(folder: Path, config: Any, run: Any) -> str:
    """Returns the errors of a session in order, joined into one string."""
    errors = []
    debug_api.initialize(config_file={"look": config}, log_dir=folder)
    try:
        run()
    except RuntimeError as error:
        errors.append(str(error))
    dist.barrier()  # until both ranks have ended `run`
    try:
        debug_api.end_debug()
    except RuntimeError as error:
        errors.append(str(error))
    dist.barrier()
    return " | ".join(errors)


def _look(layer: str = "layer", steps: int = 1) -> None:
    for _ in range(steps):
        inspect(layer, "activation", batch(0)[0])
        debug_api.step()


ACTIVATIONS = section("LogTensorStats", tensors=["activation"], stats=["max"])


def another_config(rank: int, folder: Path) -> str:
    """The configuration of rank 1 has no statistics."""
    empty = {**ACTIVATIONS, "transformer_engine": {"DisableFP8Layer": {"enabled": True}}}
    return _ends(folder, empty if rank else ACTIVATIONS, debug_api.step)


def another_group(rank: int, folder: Path) -> str:
    """Rank 0 sets a group of the same ranks; rank 1 sets none."""
    group = short_group()

    def run() -> None:
        if rank == 0:
            debug_api.set_tensor_reduction_group(group)
        _look()

    return _ends(folder, ACTIVATIONS, run)


def another_iteration(rank: int, folder: Path) -> str:
    """Rank 1 starts from another iteration."""

    def run() -> None:
        debug_api.initialize_training_step(7 * rank)
        _look()

    return _ends(folder, ACTIVATIONS, run)


def another_layer(rank: int, folder: Path) -> str:
    return _ends(folder, ACTIVATIONS, lambda: _look("ab"[rank]))


def another_layer_later(rank: int, folder: Path) -> str:
    """Rank 0 has an additional layer from the second step on."""

    def run() -> None:
        for step in range(3):
            if rank == 0 and step:
                inspect("late", "activation", batch(0)[0])
            _look()

    return _ends(folder, ACTIVATIONS, run)


def another_weight(rank: int, folder: Path) -> str:
    """Only rank 0 feeds a weight that the tensor-parallel group shards."""
    config = section("LogTensorStats", tensors=["weight"], stats=["max"])
    group = dist.new_group([0, 1])

    def run() -> None:
        if rank == 0:
            inspect("layer", "weight", batch(0)[0], tp_group=group, tp_size=2)
        debug_api.step()

    return _ends(folder, config, run)


def a_rank_that_never_steps(rank: int, folder: Path) -> str:
    group = short_group()

    def run() -> None:
        debug_api.set_tensor_reduction_group(group)
        if rank == 0:
            _look()

    return _ends(folder, ACTIVATIONS, run)


def a_session_of_one_rank(rank: int, folder: Path) -> list[str]:
    """Rank 0 waits in vain for rank 1, which has no session; then both have one."""
    if dist.get_backend() == "nccl":  # its first collective takes longer than this timeout
        return []
    group = short_group()

    def run() -> None:
        debug_api.set_tensor_reduction_group(group)
        _look()

    said = ""
    if rank == 0:
        said = _ends(folder / "one", ACTIVATIONS, run)
    else:
        dist.barrier()
        dist.barrier()
    return [said, _ends(folder / "both", ACTIVATIONS, run)]


def a_rank_that_stops(rank: int, folder: Path) -> str:
    """Rank 1 leaves out the second step. NCCL's watchdog would end the process."""
    if dist.get_backend() == "nccl":
        return ""
    group = short_group()

    def run() -> None:
        debug_api.set_tensor_reduction_group(group)
        _look(steps=2 - rank)

    return _ends(folder, ACTIVATIONS, run)


def another_modification(rank: int, folder: Path) -> str:
    """Ranks reduce the amaxes of different layers."""
    config = section("FakeQuant", gemms=["fprop"], tensors=["activation"], quant_format="FP8E4M3")
    group = short_group()

    def run() -> None:
        debug_api.set_tensor_reduction_group(group)
        build("ab"[rank])(batch(0)[0])

    return _ends(folder, config, run)


def a_session_afterwards(rank: int, folder: Path) -> str:
    """Sessions that failed before have no effect on this one."""
    return _ends(folder, ACTIVATIONS, _look)


SESSIONS = (
    halves_and_whole,
    fp8_of_each,
    shards,
    copies,
    modified,
    pipeline,
    meshes_and_other_groups,
    experts,
    evaluation,
    files_and_summary,
    another_config,
    another_group,
    another_iteration,
    another_layer,
    another_layer_later,
    another_weight,
    a_rank_that_never_steps,
    a_session_of_one_rank,
    a_rank_that_stops,
    another_modification,
    a_session_afterwards,
)
