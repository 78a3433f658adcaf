"""The control plane alone at the size of a large cluster: 1,024 agents with 8 workers each, and nobody trains.

The controller is the product's, as ``elastune run --cluster hosts:PORT`` has it: its launcher of agents, its
coordinator, its supervisor, its journal. Agents and workers are fakes that speak the real protocol over connections of
their own (``fake_agents.py``); both sides share this machine, and its cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.result_file import write_result

from elastune.core.journal.files import JournalWriter
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.hosts import HostsCluster
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.job.run import JobSupervisor, journal_in
from elastune.train.machine import software

RESULT = Path(__file__).parents[1] / "results" / "agents.json"
PROGRAM = Path(__file__).parents[2] / "examples" / "digits.py"  # nobody runs it
TOKEN = "a token of this benchmark"
LIMIT_S = 300.0
JOINED_S, CHANGED_S, HEARTBEATS_CPU = 10.0, 1.0, 0.25  # the goals, of 1,024 agents


@dataclass(frozen=True)
class Change:
    """From the event until all living workers have the newest view, and until all of them have said that they run it.

    ``views``: how many were sent; ``view_bytes``: of the message of one, to one worker.
    """

    told_s: float
    running_s: float
    views: int
    view_bytes: int


@dataclass(frozen=True)
class Measured:
    """Times in seconds. ``heartbeats_cpu``: of one core, while nothing happens; ``pushed_out``: connections that were
    closed because too many came at once, and came again. Memory is the controller's, resident, in MB."""

    agents: int
    workers: int
    joined_s: float
    first_view_s: float
    heartbeats_cpu: float
    death: list[Change]
    growth: list[Change]
    pushed_out: int
    before_mb: float
    resident_mb: float
    peak_mb: float


class Controller:
    """The product's, with fakes; ``said``: the newest of what they say of each kind, by view where it is of one."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.cluster = HostsCluster("127.0.0.1", 0, TOKEN)
        stack.callback(self.cluster.close)
        script = Path(__file__).with_name("fake_agents.py")
        self._fakes = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(self._end)
        self.tell(host="127.0.0.1", port=self.cluster.launcher.port, token=TOKEN, versions=software())
        self.views: dict[int, dict[str, Any]] = {}
        self.died_at = 0.0
        self.pushed_out = 0
        threading.Thread(target=self._listen, daemon=True).start()
        self._folder, self._stack = folder, stack
        self.run: ElasticRun | None = None

    def tell(self, **command: Any) -> None:
        """Say ``command`` to the fakes."""
        assert self._fakes.stdin is not None
        self._fakes.stdin.write(json.dumps(command).encode() + b"\n")
        self._fakes.stdin.flush()

    def _listen(self) -> None:
        assert self._fakes.stdout is not None
        for line in self._fakes.stdout:
            match json.loads(line):
                case {"view": number, **facts}:
                    self.views[number] = {**self.views.get(number, {}), **facts}
                case {"pushed_out": count}:
                    self.pushed_out = count
                case {"at": at}:
                    self.died_at = at

    def _end(self) -> None:
        self._fakes.kill()
        self._fakes.wait()

    def start(self, workers: int, low: int) -> ElasticRun:
        """A run of so many, and its journal, as ``job.run`` has them."""
        execution = ExecutionSettings(workers=workers, mode="fast", num_slots=workers)
        spec = RunSpec(
            Program(PROGRAM), self._folder / "run", execution=execution, elastic=Elastic(low=low, high=workers)
        )
        self._journal: JournalWriter = self._stack.enter_context(journal_in(spec.out, False))
        self.run = self.cluster.start(spec)
        self._supervisor = JobSupervisor(self.run)
        return self.run

    def look(self, limit_s: float = 0.5) -> None:
        """One round of the loop in ``job.run``."""
        if self.run is None:
            self.cluster.pump(limit_s)
            return
        self.cluster.wait(limit_s)
        for record in self._supervisor.pump():
            self._journal.write(record)
        self._journal.settle()
        assert self._supervisor.outcome is None, self._supervisor.outcome

    def until(self, true: Callable[[], object]) -> float:
        """Look until it is; when that was."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, "it does not come"
            self.look(0.02)
        return time.monotonic()

    def death(self, agent: int, left: int) -> Change:
        """``agent`` dies with its workers; ``left`` are left."""
        since = max(self.views)
        self.tell(die=agent)
        running = self.changed(left, since)
        return self._since(self.died_at, running, since)

    def growth(self, agent: int, room: int, members: int) -> Change:
        """``agent`` comes with room for so many; then there are so many ``members``."""
        since, begun = max(self.views), time.monotonic()
        self.tell(come=[agent, agent + 1], room=room)
        return self._since(begun, self.changed(members, since), since)

    def _since(self, begun: float, running: float, before: int) -> Change:
        newest = max(self.views)
        self.until(lambda: "last" in self.views[newest])
        result = self.views[newest]["last"]
        sent = sum(number > before for number in self.views)
        return Change(result - begun, running - begun, sent, self.views[newest]["bytes"])

    def changed(self, members: int, since: int) -> float:
        """When ``members`` run a view after ``since``."""
        run = self.run
        assert run is not None

        def runs() -> bool:
            view = run.coordinator.membership.current
            return view is not None and view.number > since and len(view.members) == members

        return self.until(runs)


def measure(agents: int, room: int, changes: int, heartbeats_s: float) -> Measured:
    """One controller's life."""
    before_mb = memory_mb("VmRSS")
    workers = agents * room
    with tempfile.TemporaryDirectory(prefix="agents-") as name, ExitStack() as stack:
        controller = Controller(stack, Path(name))
        launcher = controller.cluster.launcher
        controller.look(0.5)
        begun = time.monotonic()
        controller.tell(come=[0, agents], room=room)
        joined_s = controller.until(lambda: len(launcher.agents) == agents) - begun
        print(f"{agents} agents joined in {joined_s:.2f} s, {controller.pushed_out} came again", flush=True)
        begun = time.monotonic()
        run = controller.start(workers, low=1)
        first_view_s = controller.changed(workers, 0) - begun
        print(
            f"{workers} workers: first view after {first_view_s:.2f} s, {controller.pushed_out} came again", flush=True
        )
        time_from, cpu_from = time.monotonic(), time.process_time()
        while time.monotonic() < time_from + heartbeats_s:
            controller.look()
        heartbeats_cpu = (time.process_time() - cpu_from) / (time.monotonic() - time_from)
        print(f"heartbeats: {heartbeats_cpu:.1%} of a core", flush=True)
        assert len(run.members) == workers, f"{workers - len(run.members)} were lost by nothing"
        deaths, growths = [], []
        for nth in range(changes):
            deaths.append(controller.death(nth, workers - room))
            controller.until(lambda: len(launcher.agents) == agents - 1)
            growths.append(controller.growth(agents + nth, room, workers))
        resident_mb, peak_mb = memory_mb("VmRSS"), memory_mb("VmHWM")
        return Measured(
            agents,
            workers,
            joined_s,
            first_view_s,
            heartbeats_cpu,
            deaths,
            growths,
            controller.pushed_out,
            before_mb,
            resident_mb,
            peak_mb,
        )


def memory_mb(field: str) -> float:
    """Of this process, as the system counts it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024


def median(changes: list[Change], field: str) -> float:
    return statistics.median(getattr(change, field) for change in changes)


def against_goals(found: Measured) -> dict[str, dict[str, Any]]:
    """Each goal, what was measured (of changes the median), and whether that meets it."""
    pairs = {
        "agents_joined_s": (JOINED_S, found.joined_s),
        "workers_first_view_s": (JOINED_S, found.first_view_s),
        "death_told_s": (CHANGED_S, median(found.death, "told_s")),
        "growth_told_s": (CHANGED_S, median(found.growth, "told_s")),
        "heartbeats_cpu": (HEARTBEATS_CPU, found.heartbeats_cpu),
    }
    return {name: {"goal": goal, "measured": value, "met": value <= goal} for name, (goal, value) in pairs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="64 agents; writes nothing")
    parser.add_argument("--agents", type=int, default=1024)
    parser.add_argument("--room", type=int, default=8, help="workers of each")
    parser.add_argument("--changes", type=int, default=5, help="deaths, and growths")
    parser.add_argument("--heartbeats", type=float, default=20.0, help="seconds of nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.agents, options.changes, options.heartbeats, options.out = 64, 2, 3.0, None
    result = measure(options.agents, options.room, options.changes, options.heartbeats)
    for name, changes in (("an agent dies", result.death), ("an agent joins", result.growth)):
        told_s, running_s, views = (median(changes, field) for field in ("told_s", "running_s", "views"))
        print(
            f"{name}: told {told_s:.2f} s, running {running_s:.2f} s, {views:g} views of {changes[0].view_bytes} bytes"
        )
    print(
        f"memory: {result.before_mb:.0f} MB before, {result.resident_mb:.0f} at the end, {result.peak_mb:.0f} at most"
    )
    if options.out is not None:
        whole = {
            "fakes": "agents and workers speak the protocol and do not train; they share this machine's cores",
            "goals": against_goals(result),
            "measured": asdict(result),
        }
        write_result(options.out, whole)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
