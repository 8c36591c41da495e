"""Programs that end without `end_debug()`, disks that cannot be written, and threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_logs import messages, rows, section, statistics

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.registry import Registry, api_method

Initialize = Callable[..., Any]

PROGRAM = """
import os, signal, sys
sys.modules["torch"] = None  # takes long to import, and has no part in this
import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.debug_manager import subscribe

class Late:  # statistics that land later than their step
    def initialized(self, manager):
        self.waiting = []
        manager.drain.append(self.drain)
    def stepped(self, manager):
        self.waiting.append(manager.iteration - 1)
        if len(self.waiting) > 2:
            self.log(self.waiting.pop(0))
    def drain(self):
        while self.waiting:
            self.log(self.waiting.pop(0))
    def log(self, iteration):
        debug_api.DEBUG_MANAGER.log_statistics(iteration, "fc1", "weight", {"min": 0.1})
    def ended(self, manager):
        pass

subscribe(Late())
debug_api.initialize(log_dir=sys.argv[1])
for step in range(5):
    debug_api.step()
"""


def run(tmp_path: Path, then: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program + then, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("torch", ["torch is there", "torch is missing"])
def test_exit_drains(tmp_path: Path, torch: str) -> None:
    missing = next(line for line in PROGRAM.splitlines() if "torch" in line)
    done = run(tmp_path, "", PROGRAM if "missing" in torch else PROGRAM.replace(missing, ""))
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["iteration"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]


def test_exit_by_an_exception_drains(tmp_path: Path) -> None:
    assert run(tmp_path, "raise RuntimeError('mine')").returncode == 1
    assert len(rows(tmp_path)) == 5


def test_sigterm_drains_and_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)\nprint('alive')")
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == ""
    assert len(rows(tmp_path)) == 5


def test_sigterm_reaches_the_handler_of_the_program(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('mine'), sys.exit(7)))\n"
    body = PROGRAM.replace("subscribe(Late())", handler + "subscribe(Late())")
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)", body)
    assert (done.returncode, done.stdout) == (7, "mine\n")
    assert len(rows(tmp_path)) == 5


def test_kill_loses_only_what_is_under_way(tmp_path: Path) -> None:
    then = (
        "debug_api.DEBUG_MANAGER.log_statistics(9, 'fc1', 'weight', {'min': 0.1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run(tmp_path, then).returncode == -signal.SIGKILL
    assert [row["iteration"] for row in rows(tmp_path)] == [0, 1, 2]
    assert len(statistics(tmp_path)) == 3


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_forked_children_leave_the_session_alone(tmp_path: Path, end: str) -> None:
    done = run(tmp_path, f"if os.fork() == 0:\n    {end}\nos.wait()")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows(tmp_path)) == len(statistics(tmp_path)) == 5


FORK = """
import threading
from nvdlfw_inspect.logging import MetricLogger

def child_ends():
    if (child := os.fork()) == 0:
        signal.alarm(10)
        debug_api.end_debug()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
"""
WHILE_A_THREAD_LOGS = """
over = threading.Event()
def log():
    while not over.is_set():
        MetricLogger.log_scalar("n" * 100_000, 1.0, 0)
thread = threading.Thread(target=log)
thread.start()
ended = all(child_ends() for _ in range(50))
"""
WHILE_A_THREAD_STEPS = """
begun, over = threading.Event(), threading.Event()
class Slow:
    def initialized(self, manager): pass
    def stepped(self, manager): begun.set(), over.wait()
    def ended(self, manager): pass
subscribe(Slow())
thread = threading.Thread(target=debug_api.step)
thread.start()
begun.wait()
ended = child_ends()
"""


@pytest.mark.parametrize("meanwhile", [WHILE_A_THREAD_LOGS, WHILE_A_THREAD_STEPS])
def test_forked_children_do_not_wait_for_threads_of_their_parent(
    tmp_path: Path, meanwhile: str
) -> None:
    done = run(tmp_path, f"{FORK}{meanwhile}over.set()\nthread.join()\nprint(ended)")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_handler_is_put_back(initialize: Initialize) -> None:
    before = signal.getsignal(signal.SIGTERM)
    initialize()
    assert signal.getsignal(signal.SIGTERM) != before
    debug_api.end_debug()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("chained", [False, True])
def test_sigterm_drains_after_the_program_has_replaced_the_handler(
    tmp_path: Path, chained: bool
) -> None:
    then = f"""
earlier = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *got: earlier(*got) if {chained} else os._exit(7))
debug_api.end_debug()
debug_api.initialize(log_dir=sys.argv[1])
debug_api.step()
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = run(tmp_path, then)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM if chained else 7, "")
    assert len(rows(tmp_path)) == 6


def test_a_session_may_begin_on_another_thread(initialize: Initialize) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=initialize)
    thread.start()
    thread.join()
    assert debug_api.DEBUG_MANAGER is not None
    assert signal.getsignal(signal.SIGTERM) == before


FULL = """
import resource, signal, sys, warnings
sys.modules["torch"] = None
import nvdlfw_inspect.api as debug_api
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
debug_api.initialize(log_dir=sys.argv[1], log_timestamps=False)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(10):
        debug_api.DEBUG_MANAGER.log_statistics(step, "fc1", "weight", {"min": 0.1})
        debug_api.step()
print(len(caught), caught[0].message)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
debug_api.step()
"""


def test_a_full_disk_stops_nothing_and_loses_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "", FULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 [logs] cannot write")
    assert [row["iteration"] for row in rows(tmp_path)] == list(range(10))
    assert len(statistics(tmp_path)) == 10


def test_a_flush_waits_for_that_of_another_thread(initialize: Initialize, tmp_path: Path) -> None:
    manager, begun, late = initialize(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        late.wait(30)

    manager.drain.append(wait)  # as statistics that a device still computes
    thread = threading.Thread(target=debug_api.flush)
    thread.start()
    begun.wait()
    manager.log_statistics(0, "fc1", "weight", {"min": 0.1})
    threading.Timer(0.05, late.set).start()
    debug_api.flush()
    assert late.is_set() and len(rows(tmp_path)) == 1
    thread.join()


def test_threads_step_log_and_decide_at_once(initialize: Initialize, tmp_path: Path) -> None:
    @Registry.register_feature(namespace="ns")
    class Mine:
        @api_method
        def look_enabled(self, iteration: int, layer_name: str) -> Any:
            debug_api.log_message(f"asked at {iteration}", layer_name)
            return True, iteration + 1

        @api_method
        def look(self, tensor: list) -> None:
            tensor.append(1)

    manager = initialize({"s": section("Mine")})
    seen: list[list[int]] = [[], [], []]
    errors: list[BaseException] = []

    def work(mine: list[int]) -> None:
        try:
            for i in range(150):
                manager.call("ns", "look", layer_name=f"fc1.{i % 5}", tensor=mine)
                manager.log_statistics(i, "fc1", "weight", {"min": 0.5})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for _ in range(50):
        debug_api.step()
    for thread in threads:
        thread.join()
    debug_api.end_debug()
    assert not errors
    assert [len(mine) for mine in seen] == [150] * 3
    assert len(rows(tmp_path)) == len(statistics(tmp_path)) == 450
    asked = [line for line in messages(tmp_path) if "asked" in line]
    assert len(asked) == len(set(asked))
