"""Every thread and asyncio task has scopes of its own, and updates the scales of its own models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
)
from transformer_engine.pytorch.fp8.autocast_stack import autocast_stack
from transformer_engine.pytorch.fp8.scaling_state import FORWARD

SHORT = DelayedScaling(amax_history_len=4)
PRECISIONS: list[tuple[Any, Any]] = [
    (SHORT, SHORT),
    (SHORT, DelayedScaling(amax_history_len=8, fp8_format=Format.E4M3)),
    (SHORT, None),
    (SHORT, Float8CurrentScaling()),
    (DelayedScaling(amax_compute_algo="most_recent"), Float8BlockScaling()),
]


def autocast(recipe: Any) -> Any:
    return nullcontext() if recipe is None else te.autocast(recipe=recipe)


def model(seed: int, device: str) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        te.LayerNormMLP(32, 64, device=device), te.Linear(32, 32, device=device)
    )


def train(
    layers: torch.nn.Sequential, seed: int, recipe: Any, wait: Callable[[], Any] = bool
) -> list[Any]:
    """Train for 200 steps; return the losses, the parameters and the scales."""
    device = layers[1].weight.device
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.5)
    generator = torch.Generator(device).manual_seed(seed)
    losses = []
    for _ in range(200):
        x = torch.randn(16, 32, device=device, generator=generator)
        wait()
        with autocast(recipe):
            y = layers(x)
        wait()
        loss = (y - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    scales = [s.scale for part in layers for s in part.scaling.values()]
    return [*losses, *layers.parameters(), *scales]


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Run the functions at the same time, each in a thread, and return their results."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(i: int, body: Callable[[], Any]) -> None:
        try:
            results[i] = body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.sampled_on_cpu
@pytest.mark.parametrize("pair", PRECISIONS, ids=lambda pair: "+".join(map(_name, pair)))
def test_two_models_in_two_threads_train_as_one_after_the_other(
    pair: tuple[Any, Any], device: str
) -> None:
    serial = [train(model(i, device), i, recipe) for i, recipe in enumerate(pair)]
    wait = threading.Barrier(2, timeout=60).wait
    calls = [partial(train, model(i, device), i, recipe, wait) for i, recipe in enumerate(pair)]
    threaded = in_threads(*calls)
    for expected, got in zip(serial, threaded, strict=True):
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)


def _name(recipe: Any) -> str:
    return "high precision" if recipe is None else type(recipe).__name__


def test_a_thread_outside_of_autocast_computes_in_high_precision(device: str) -> None:
    layer = te.Linear(32, 32, device=device)
    x = torch.randn(16, 32, device=device)
    expected = layer(x)
    with te.autocast(recipe=Float8CurrentScaling()):
        quantised = layer(x)
        (got,) = in_threads(lambda: layer(x))
    assert torch.equal(got, expected) and not torch.equal(quantised, expected)


def test_tasks_have_scopes_of_their_own() -> None:
    seen = {}

    async def task(name: str, recipe: Any, before: float, inside: float) -> None:
        await asyncio.sleep(before)
        with autocast(recipe):
            await asyncio.sleep(inside)
            seen[name] = autocast_stack().scope.recipe
        seen[name + " left"] = autocast_stack().scope.enabled

    async def every() -> None:
        await asyncio.gather(
            task("first", SHORT, 0.0, 0.02),
            task("second", Float8CurrentScaling(), 0.01, 0.03),
            task("outside", None, 0.0, 0.015),
        )

    asyncio.run(every())
    assert seen["first"] is SHORT and seen["outside"] is None
    assert isinstance(seen["second"], Float8CurrentScaling)
    assert not any(seen[name + " left"] for name in ("first", "second", "outside"))
    assert not autocast_stack().scope.enabled


def test_a_backward_in_another_thread_updates_the_model_of_its_forward() -> None:
    layers, other = model(0, "cpu"), model(1, "cpu")
    x = torch.randn(16, 32)
    with te.autocast(recipe=SHORT):
        loss = layers(x).square().sum()
    with te.autocast(recipe=SHORT):
        other(x).square().sum()
        in_threads(loss.backward)
    assert (layers[1].scaling["backward"].scale[0] != 1.0).item()
    assert (layers[1].scaling["backward"].amax_history[0] == 0.0).all()
    assert (other[1].scaling["backward"].scale == 1.0).all()


class _Fails(Exception):
    pass


def test_a_recipe_that_fails_breaks_its_own_model_alone() -> None:
    def fail(amax: torch.Tensor, *_: Any) -> torch.Tensor:
        raise _Fails

    x = torch.randn(16, 32)
    bad, good = te.Linear(32, 32, device="cpu"), te.Linear(32, 32, device="cpu")
    recipe = DelayedScaling(scaling_factor_compute_algo=fail)
    with pytest.raises(_Fails), te.autocast(recipe=recipe):
        bad(x)
    for _ in range(2):
        with te.autocast(recipe=SHORT):
            good(x)
    assert good.scaling[FORWARD].scale[0] == 448.0 / x.abs().max()


def test_leaving_an_autocast_updates_the_models_that_ran_in_it() -> None:
    x = torch.randn(16, 32)
    first, second = te.Linear(32, 32, device="cpu"), te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=SHORT):
        first(x)
    first.scaling[FORWARD].amax_history[0] = 3.0  # as if a step of another thread were running
    with te.autocast(recipe=SHORT):
        second(x)
    assert (first.scaling[FORWARD].amax_history[0] == 3.0).all()
    assert (second.scaling[FORWARD].amax_history[0] == 0.0).all()


def test_models_that_come_together_are_updated_together() -> None:
    x = torch.randn(16, 32)
    first, second = te.Linear(32, 32, device="cpu"), te.Linear(32, 32, device="cpu")
    for layers in ((first,), (second,), (first, second)):
        with te.autocast(recipe=SHORT):
            for layer in layers:
                layer(x)
    group = first.scaling[FORWARD].group
    assert second.scaling[FORWARD].group is group
    assert len(group.members[FORWARD].alive()) == 2


def test_leaving_more_scopes_than_were_entered() -> None:
    scope = te.fp8_autocast(enabled=True)
    with scope:
        pass
    with pytest.raises(RuntimeError, match=r"^\[autocast\] expected a scope to leave, got none"):
        scope.__exit__(None, None, None)
    with te.fp8_autocast(enabled=True):
        assert te.Linear(32, 32, device="cpu").fp8
