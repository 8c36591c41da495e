"""`CudaRNGStatesTracker`: named states of the random number generator.

With tensor parallelism, ranks must draw different numbers where they hold parts of one tensor, and
the same numbers elsewhere. A tracker has a state for each purpose. Inside of its `fork`, torch's
default generator continues from one of them, and afterwards from where it was before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine.pytorch.fp8.process_state import process_state

DEFAULT_NAME = "model-parallel-rng"

State = torch.Tensor | torch.Generator


def graph_safe_rng_available() -> bool:
    """Whether torch can swap whole generators, which works while a CUDA graph is captured."""
    return hasattr(torch.cuda.CUDAGraph, "register_generator_state") and hasattr(
        torch.Generator, "graphsafe_set_state"
    )


def get_all_rng_states() -> dict[str, State]:
    """The states of all trackers of the process, by name; on CUDA a graph can register them.

    >>> tracker = CudaRNGStatesTracker(device="cpu")
    >>> tracker.add("experts", 7)
    >>> "experts" in get_all_rng_states()
    True
    """
    return {
        name: state
        for tracker in process_state().rng_trackers
        for name, state in tracker.get_states().items()
    }


def set_all_rng_states(states: Mapping[str, State]) -> None:
    """Set the states of all trackers that have one of these names.

    Args:
        states: as `get_all_rng_states` returns them.
    """
    for tracker in list(process_state().rng_trackers):
        own = {name: states.get(name, state) for name, state in tracker.get_states().items()}
        tracker.set_states(own)


def snapshot(states: Any) -> Any:
    """Copies of the states that a tracker's `get_states` returned."""
    if isinstance(states, Mapping):
        return {name: snapshot(state) for name, state in states.items()}
    if isinstance(states, torch.Generator):
        return states.clone_state()
    return states.clone() if isinstance(states, torch.Tensor) else states


def check_tracker(op: str, get: object, layer: str = "") -> None:
    """Raise TypeError unless `get`, which should return a tracker, is None or a function."""
    if get is None or callable(get):
        return
    hint = "; did you mean lambda: tracker?" if hasattr(get, "fork") else ""
    where = f" (layer {layer})" if layer else ""
    raise TypeError(
        f"[{op}] expected get_rng_state_tracker to be a function that returns a tracker, got a"
        f" {type(get).__name__}{hint}{where}"
    )


def tracker_from(op: str, get: Any, *methods: str, layer: str = "") -> Any:
    """The tracker, or None, that `get` returns; raise TypeError unless it has these methods."""
    tracker = None if get is None else get()
    if tracker is None or all([hasattr(tracker, method) for method in methods]):
        return tracker
    where = f" (layer {layer})" if layer else ""
    raise TypeError(
        f"[{op}] expected get_rng_state_tracker to return a tracker, with {' and '.join(methods)},"
        f" got a {type(tracker).__name__}{where}"
    )


class CudaRNGStatesTracker:
    """Keeps random number states by name, and runs parts of a model under one of them.

    Ranks that hold parts of one tensor must draw different numbers for it, and the same numbers
    elsewhere. For this, `add` makes a separate state, and inside of `fork` torch draws from it.

    On CUDA a state is a `torch.Generator`, from which a CUDA graph can draw once it is registered
    with the graph (see `register_with`). On the CPU it is a uint8 tensor. `get_states` returns the
    states themselves, not copies. To save the states of CUDA, use `{name: state.get_state() ...}`;
    `set_states` takes such tensors, too.

    Args:
        device: the device whose generator is forked; None is cuda if there is a GPU, else cpu.
            `cuda` without an index is the device that is current when a state is made.

    Attributes:
        states_: states by name.
        seeds_: seeds that `add` was given.

    >>> import torch
    >>> tracker = CudaRNGStatesTracker(device="cpu")
    >>> tracker.add("model-parallel-rng", 1234)
    >>> with tracker.fork():
    ...     first = torch.rand(3)
    >>> bool(torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(1234))))
    True
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        if device is not None and torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(
                f"[CudaRNGStatesTracker] expected device 'cuda', 'cpu' or None, got {device}"
            )
        self._device = None if device is None else torch.device(device)
        self._entered: list[_Open] = []  # innermost last
        self.states_: dict[str, State] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states and seeds."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, State]:
        """A new mapping from names to the states themselves."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, State]) -> None:
        """Replace all states. Sizes and seeds are not checked.

        Args:
            states: by name, as `get_states` returns them. On CUDA, a uint8 tensor is copied into
                the generator of that name if there is one, so that a CUDA graph that draws from
                this generator continues from there.

        Raises:
            TypeError: no mapping, or values that are no states.
        """
        if not hasattr(states, "items"):
            raise TypeError(
                "[CudaRNGStatesTracker] expected a mapping from names to states, got "
                f"{type(states).__name__}"
            )
        self.states_ = {name: self._adopted(name, state) for name, state in states.items()}
        process_state().rng_trackers.add(self)

    def add(self, name: str, seed: int) -> None:
        """Make a state; torch's own generators do not change.

        Args:
            name: name of the new state.
            seed: seed of the new state.

        Raises:
            ValueError: the name or the seed is taken.
            TypeError: a seed that is no int.
        """
        try:
            seed = operator.index(seed)
        except TypeError as error:
            raise TypeError(
                f"[CudaRNGStatesTracker] expected seed to be an int, got {seed!r} (state {name})"
            ) from error
        if seed in self.seeds_:
            raise ValueError(f"[CudaRNGStatesTracker] seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"[CudaRNGStatesTracker] cuda rng state {name} already exists")
        device = self._where()
        generator = torch.Generator(device).manual_seed(seed)
        self.states_[name] = generator if device.type == "cuda" else generator.get_state()
        self.seeds_.add(seed)
        process_state().rng_trackers.add(self)

    @contextmanager
    def fork(self, name: str = DEFAULT_NAME) -> Iterator[None]:
        """Inside of the `with`, draw from a named state; the next `fork` of it continues there.

        Forks may be nested, also forks of one name.

        Args:
            name: name of the state.

        Raises:
            KeyError: no such state.
        """
        if name not in self.states_:
            known = ", ".join(map(repr, self.states_)) or "none"
            raise KeyError(
                f"[CudaRNGStatesTracker] cuda rng state {name} is not added: known are {known}"
            )
        state = self.states_[name]
        with _lent(state) if isinstance(state, torch.Generator) else self._copied(name):
            yield

    def register_with(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a CUDA graph draw from the states of CUDA; call it before the capture.

        Args:
            graph: the graph that will be captured; each of its replays then draws new numbers.

        Example, on a GPU:

            graph = torch.cuda.CUDAGraph()
            tracker.register_with(graph)
            with torch.cuda.graph(graph):
                out = model(x)
        """
        for state in self.states_.values():
            if isinstance(state, torch.Generator):
                graph.register_generator_state(state)

    def _where(self) -> torch.device:
        kind = self._device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if str(kind) == "cuda":  # no index
            return torch.device("cuda", torch.cuda.current_device())
        return kind

    def _adopted(self, name: str, state: Any) -> State:
        if isinstance(state, torch.Generator):
            return state if state.device.type == "cuda" else state.get_state()
        if not isinstance(state, torch.Tensor):
            raise TypeError(
                "[CudaRNGStatesTracker] expected a torch.Generator or a tensor for state "
                f"{name}, got {type(state).__name__}"
            )
        device = self._where()
        if device.type == "cpu":
            return state
        present = self.states_.get(name)
        generator = present if isinstance(present, torch.Generator) else torch.Generator(device)
        return generator.set_state(state)

    @contextmanager
    def _copied(self, name: str) -> Iterator[None]:
        """`fork` on the CPU, whose generators cannot be swapped: it copies states both ways."""
        default = torch.default_generator
        outside = default.get_state()
        outer = self._entered[-1] if self._entered else None
        if outer is not None and not outer.put(self.states_, outside):
            outer = None
        own = _Open(name, self.states_[name])
        default.set_state(own.state)
        self._entered.append(own)
        try:
            yield
        finally:
            self._entered.pop()
            own.put(self.states_, default.get_state())
            if outer is not None:  # an inner fork of the same name has moved its state on
                outer.state = self.states_.get(outer.name, outside)
            default.set_state(outside if outer is None else outer.state)


@dataclass
class _Open:
    """A fork that has been entered: its name, and the state that the tracker has for it."""

    name: str
    state: Any

    def put(self, states: dict[str, State], state: torch.Tensor) -> bool:
        """Store how far the fork got, unless `reset` or `set_states` came between."""
        if states.get(self.name) is not self.state:
            return False
        self.state = states[self.name] = state
        return True


@contextmanager
def _lent(generator: torch.Generator) -> Iterator[None]:
    """`fork` on CUDA: inside, the device's default generator uses the state of `generator`.

    They share one state, so that draws move both on.
    """
    index = generator.device.index  # None for a generator that was made for "cuda"
    default = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    outside = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(outside)


class StatesOf:
    """A context in which a tracker has earlier states, a `snapshot`, for a recompute.

    It may be entered again each time that autograd runs a graph.
    """

    def __init__(self, tracker: Any, states: Any) -> None:
        self.tracker = tracker
        self.states = states
        self.later: Any = None

    def __enter__(self) -> None:
        self.later = self.tracker.get_states()
        self.tracker.set_states(snapshot(self.states))

    def __exit__(self, *error: object) -> None:
        self.tracker.set_states(self.later)
