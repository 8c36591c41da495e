"""Compares what the debugger logs of a tensor-parallel Linear and of the whole layer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from debug_rank_cases import half, solo
from debug_session import SIX, Logged, debugging, logged, section
from rank_device import here

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te

SIZE, TOKENS = 32, 16
STATISTICS = ["l1_norm", "max", "min"]
LOOK = section("LogTensorStats", tensors=SIX, stats=STATISTICS)
WHAT_IF = section("LogFp8TensorStats", tensors=SIX[:3], stats=["fp8_current_scaling_scale_inv_max"])
DUMP = section("DumpTensors", tensors=SIX, high_precision_tensor=True)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a weight, an input and a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((SIZE, SIZE), (TOKENS, SIZE), (TOKENS, SIZE))
    weight, x, grad = (torch.randn(shape, generator=generator).to(here()) for shape in shapes)
    return weight, x, grad


def _train(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> None:
    layer(x.requires_grad_()).backward(grad)
    debug_api.step()


def shared_layers(rank: int, folder: Path) -> dict[str, Logged]:
    """Returns what is logged of the whole layer, and of each way to shard it."""
    weight, x, grad = tensors()
    group = dist.new_group([0, 1])
    whole = te.Linear(SIZE, SIZE, bias=False, device=here(), name="layer")
    with torch.no_grad():
        whole.weight.copy_(weight)
    with debugging(folder / "whole", LOOK):
        debug_api.set_tensor_reduction_group(solo(rank))
        _train(whole, x.clone(), grad)
    found = {"whole": logged(folder / "whole", rank)}
    for mode in ("column", "row"):
        for sequence in (False, True):
            options: dict[str, Any] = {"parallel_mode": mode, "sequence_parallel": sequence}
            layer = te.Linear(
                SIZE, SIZE, bias=False, device=here(), name="layer", tp_group=group, **options
            )
            by_column = mode == "column"
            own_x, own_grad = (x, half(grad, rank, 1)) if by_column else (half(x, rank, 1), grad)
            if sequence and by_column:
                own_x = half(x, rank)
            elif sequence:
                own_grad = half(grad, rank)
            with torch.no_grad():
                layer.weight.copy_(half(weight, rank, 0 if by_column else 1))
            for end, beside in (("", []), (" beside DumpTensors", [DUMP])):
                name = f"{mode} {sequence}{end}"
                with debugging(folder / name, LOOK, *beside):
                    _train(layer, own_x.clone(), own_grad)
                found[name] = logged(folder / name, rank)
    return found


def compiled_shared_layers(rank: int, folder: Path) -> dict[str, list[Logged]]:
    """Returns what is logged of an eager layer, and of the compiled one.

    Statistics of the weights of "row" are merged over another group than the reduction group.
    """
    options: dict[str, Any] = {"tp_group": dist.new_group([0, 1]), "name": "layer"}
    options |= {"device": here(), "params_dtype": torch.bfloat16}
    makes = {
        "mlp": lambda: te.LayerNormMLP(
            SIZE, SIZE, set_parallel_mode=True, sequence_parallel=True, **options
        ),
        "row": lambda: te.Linear(2 * SIZE, SIZE, parallel_mode="row", **options),
    }
    found: dict[str, list[Logged]] = {}
    for name, make in makes.items():
        for compiled in (False, True):
            torch.manual_seed(7)
            layer = make()
            run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
            x = tensors()[1].bfloat16()
            with debugging(folder / f"{name} {compiled}", LOOK, WHAT_IF):
                if name == "row":
                    debug_api.set_tensor_reduction_group(solo(rank))
                for _ in range(2):
                    with te.fp8_autocast(fp8_group=options["tp_group"]):
                        y = run(x.requires_grad_())
                    y.sum().backward()
                    debug_api.step()
            found.setdefault(name, []).append(logged(folder / f"{name} {compiled}", rank))
    return found


def gathered_norms(rank: int, folder: Path) -> dict[str, list[bool]]:
    """Returns for each way to run a layer whether features that look at it change no result."""
    group = dist.new_group([0, 1])
    found: dict[str, list[bool]] = {}

    def trained(way: str, tokens: int) -> list[torch.Tensor]:
        torch.manual_seed(7)
        layer: Any = te.LayerNormMLP(
            *(SIZE, SIZE),
            set_parallel_mode=True,
            sequence_parallel=True,
            params_dtype=torch.bfloat16,
            **{"tp_group": group, "name": "layer", "device": here()},
        )
        run = torch.compile(layer, backend="aot_eager") if way == "compiled" else layer
        x = tensors()[1][:tokens].bfloat16().requires_grad_()
        results = []
        for _ in range(2):
            with te.fp8_autocast(fp8_group=group):
                y = te.checkpoint(run, x) if way == "checkpoint" else run(x)
            y.sum().backward()
            debug_api.step()
            results.append(y.detach())
        return [*results, x.grad, *(p.grad for p in layer.parameters())]

    casts = section("LogFp8TensorStats", tensors=SIX[:1], stats=["mse", "mse_columnwise"])
    for way in ("eager", "checkpoint", "compiled"):
        for tokens in (TOKENS, 5):
            expected = trained(way, tokens)
            for name, sections in {"statistics": [LOOK, casts], "dumps": [LOOK, DUMP]}.items():
                if (way, name) == ("compiled", "dumps"):
                    continue
                case = f"{way} {tokens} {name}"
                with debugging(folder / case, *sections):
                    results = trained(way, tokens)
                same = zip(results, expected, strict=True)
                found[case] = [torch.equal(a, b) for a, b in same]
    return found
