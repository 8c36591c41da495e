"""What each rank of distributed/test_sharing runs: what is around the layers that ranks share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from attempts import failures
from rank_device import here
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te


class Inside(nn.Module):
    """Calls its layer `module`, as wrappers do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.module = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def _mesh() -> Any:
    return init_device_mesh(here().type, (1, 2), mesh_dim_names=("dp", "tp"))


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, process_group=_mesh()["dp"].get_group())


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": torch.compile,
    "checkpointed": checkpoint_wrapper,
    "attribute": Inside,
    "ddp": _ddp,
    "ddp compiled": lambda model: torch.compile(_ddp(model)),
    "ddp checkpointed": lambda model: _ddp(nn.Sequential(checkpoint_wrapper(model))),
}


def _stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a layer that ranks share, and its optimizer after a step."""
    torch.manual_seed(0)
    model = te.Linear(32, 32, device=here())
    te.parallelize(model, _mesh(), {"": "column"})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(16, 32, device=here())).sum().backward()
    optimizer.step()
    return model, optimizer


def states_of_wrapped_layers(rank: int) -> None:
    """Whatever is around a layer, states of the optimizer are of the whole, and load as parts."""
    for name, wrap in WRAPPERS.items():
        model, optimizer = _stepped()
        wrapped, moment = wrap(model), optimizer.state[model.weight]["exp_avg"]
        moment.fill_(rank)
        states = te.distributed.get_state_dict(wrapped, optimizer)
        (found,) = (one for key, one in states[1]["state"].items() if key.endswith("weight"))
        whole = found["exp_avg"].full_tensor()
        assert whole.shape == (32, 32), name
        assert torch.equal(whole.chunk(2)[rank], moment), name
        optimizer.step()  # goes on with its parts, which `states` has too
        optimizer.state[model.weight]["exp_avg"] = torch.zeros_like(moment)
        te.distributed.set_state_dict(
            wrapped, optimizer, model_state_dict=states[0], optim_state_dict=states[1]
        )
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment), name


def options_of_states(rank: int) -> None:
    """Options that take parts of an optimizer's states for whole tensors are refused."""
    model, optimizer = _stepped()
    model_state, state = te.distributed.get_state_dict(model, optimizer)
    get = functools.partial(te.distributed.get_state_dict, model, optimizer)
    load = functools.partial(
        te.distributed.set_state_dict,
        *(model, optimizer),
        model_state_dict=model_state,
        optim_state_dict=state,
    )
    for call, names in (
        (get, ("flatten_optimizer_state_dict", "full_state_dict")),
        (load, ("flatten_optimizer_state_dict", "broadcast_from_rank0")),
    ):
        for name in names:
            try:
                call(options=StateDictOptions(**{name: True}))
            except NotImplementedError as error:
                assert f"expected {name}=False" in str(error), error
            else:
                raise AssertionError(f"nothing was raised: {name}")


def tied_weights(rank: int) -> None:
    """Weights that another module has are refused, and stay tied; ties of whole modules stay."""
    words, head, twin = (te.Linear(32, 32, bias=False, device=here()) for _ in range(3))
    head.weight = words.weight
    model = nn.ModuleDict({"words": words, "head": head, "twin": twin})
    for plan in ({"head": "column"}, {"words": "column", "head": "column"}):
        try:
            te.parallelize(model, _mesh(), plan)
        except ValueError as error:
            assert "tied ones: words.weight and head.weight" in str(error), error
        else:
            raise AssertionError(f"nothing was raised: {plan}")
    te.parallelize(model, _mesh(), {"twin": "column"})
    assert head.weight is words.weight and twin.weight.shape == (16, 32)


def marks_of_parameters(rank: int) -> None:
    """Attributes by which optimizers group parameters stay; gradients of wholes do not."""
    for in_fp8 in (False, True):
        with te.quantized_model_init(in_fp8):
            model = te.Linear(32, 32, device=here())
        for parameter in model.parameters():
            parameter.no_decay, parameter.main_grad = True, torch.zeros(32)
        te.parallelize(model, _mesh(), {"": "column"})
        for parameter in model.parameters():
            assert parameter.no_decay and not hasattr(parameter, "main_grad")
            assert parameter.tensor_model_parallel


def layers_that_torch_has_not(rank: int) -> None:
    """`te.convert` leaves layers of several ranks, whose collectives torch's layers do not have."""
    shared = {"tp_group": _mesh()["tp"].get_group(), "bias": False, "device": here()}
    model = nn.Sequential(
        te.Linear(32, 64, parallel_mode="column", **shared),
        te.LayerNormLinear(32, 64, parallel_mode="column", **shared),
        te.Linear(64, 32, parallel_mode="row", **shared),
    )
    report = te.convert(model, to="torch")
    assert not report.replaced, report
    assert len(report.left) == 3 and "2 tensor parallel ranks" in str(report.left), report.left


SCENARIOS = {
    run.__name__: run
    for run in (
        *(states_of_wrapped_layers, options_of_states),
        *(tied_weights, marks_of_parameters, layers_that_torch_has_not),
    )
}


def scenarios(rank: int) -> dict[str, str]:
    """Returns the traceback of each scenario that failed, "" where it passed."""
    return failures(SCENARIOS, rank)
