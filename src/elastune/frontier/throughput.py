"""The throughput phase: which means of a crew give the same bits sooner. Short runs, no quality, no training. Pure.

One kind of means after the other (threads, mechanism, routes, bucket size, micro-batch), each from the best of those
before. What ends with other bits than the crew's own means did, after as many steps from the same seed, is not taken,
however fast it is: what was told of the crew's quality then holds of them, too. The fastest of many short runs is often
a lucky one, so that it and the crew's own means are timed again, and it is taken if it is faster then, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastune.core.mechanism_name import MechanismName
from elastune.core.mesh import Mesh
from elastune.core.ownership import BUCKET_BYTES, FIRST_BUCKET_BYTES
from elastune.core.run import Means
from elastune.core.topology import Topology
from elastune.journal.records import MeansTimed, RunFinished, ThroughputTuned

GAIN = 1.05  # what is not faster by so much is not worth other means: a step's time varies by as much from run to run
BUCKETS = (256 << 10, 1 << 20, 4 << 20, 64 << 20)
"""Bytes of gradients that are summed in one message, where there are more of them."""
ROUTES = ("ring", "tree", "star")  # that are tried where more than two workers sum


@dataclass
class MeansClimb:
    """The tuning of one crew: it asks for ``pending`` to be timed, and is told what came of it.

    ``batch``: the global batch of all its short runs; ``cores``: how many its workers share; ``free``: whether nobody
    has said how its workers stand, so that another mechanism may do. ``grad_bytes``: of all gradients, as its first
    short run tells. ``hurried``: no time is left for more kinds of
    means; the best so far is timed again.
    """

    crew: Means
    batch: int
    cores: int
    free: bool
    tried: list[MeansTimed] = field(default_factory=list)
    hurried: bool = False
    grad_bytes: int = 0
    _means: list[Means] = field(default_factory=list)
    _best: int = 0
    _sha256: str = ""
    _again: list[int] = field(default_factory=list)

    @classmethod
    def most(cls, crew: Means, cores: int, free: bool = True) -> list[Means]:
        """All that could be tried of a crew, and the best again, if no kind changes what the next one can try."""
        climb = cls(crew, crew.first_mesh.batch * 2, cores, free, grad_bytes=1 << 62)
        kinds = (climb._threads, climb._mechanisms, climb._routes, climb._buckets, climb._passes)
        return [crew, *(means for kind in kinds for means in kind(crew)), crew, crew]

    @property
    def repeats(self) -> bool:
        """Whether what was asked for last was timed before."""
        return bool(self._again)

    def rounds(self) -> Iterator[list[Means]]:
        """What to time next, until nothing is left; ``hear`` must have been told of all of it by then."""
        yield [self.crew]
        if self.tried[0].step_s is None:
            return  # it fails by itself, or has too few steps to time
        for kind in (self._threads, self._mechanisms, self._routes, self._buckets, self._passes):
            if self.hurried:
                break
            yield kind(self._means[self._best])
        if self._best:
            self._again = [0, self._best]
            yield [self.crew, self._means[self._best]]
            own, other = self.tried[-2:]
            lucky = own.step_s is None or other.step_s is None or other.step_s * GAIN >= own.step_s or not other.same
            self._best = 0 if lucky else len(self.tried) - 1

    def give_up(self) -> None:
        """No time is left to time the best again: the crew keeps its own means."""
        self._best = 0

    def hear(self, means: Means, run: RunFinished | None) -> None:
        """A short run by ``means`` has ended; None: it failed."""
        first = not self.tried
        if first and run is not None:
            self._sha256 = run.sha256
            self.grad_bytes = run.grad_bytes
        step_s = None if run is None else run.step_s
        same = None if run is None else run.sha256 == self._sha256
        words = changed(self.crew, means) or "as asked for"
        self.tried.append(MeansTimed(means.to_json(), words, step_s, same))
        self._means.append(means)
        if self._again:
            return
        best_s = self.tried[self._best].step_s
        if same and step_s is not None and best_s is not None and step_s * GAIN < best_s:
            self._best = len(self.tried) - 1

    @property
    def best(self) -> Means:
        """The fastest of those with the same bits."""
        return self._means[self._best] if self._means else self.crew

    @property
    def found(self) -> ThroughputTuned:
        """What to tell of it."""
        return ThroughputTuned(self.batch, list(self.tried), self._best)  # which has one at least: the crew's own

    def _threads(self, means: Means) -> list[Means]:
        most = self.cores // means.workers
        counts = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
        return [replace(means, threads=n) for n in dict.fromkeys((*counts, most)) if n > means.threads]

    def _mechanisms(self, means: Means) -> list[Means]:
        if not self.free or means.workers == 1 or means.parts != MechanismName():
            return []
        mesh = Mesh(shard=means.workers)
        return [replace(means, mesh=mesh, mechanism=name, topology=Topology()) for name in ("zero", "sharded")]

    def _routes(self, means: Means) -> list[Means]:
        if means.workers <= 2 or means.parts != MechanismName() or means.compress is not None:
            return []
        return [replace(means, topology=Topology.parse(name)) for name in ROUTES if name != str(means.topology)]

    def _buckets(self, means: Means) -> list[Means]:
        """Sizes by which there are other buckets than by the usual ones."""
        whole = means.parts == MechanismName() and means.compress is None
        if means.workers == 1 or not whole:
            return []
        usual = BUCKET_BYTES + FIRST_BUCKET_BYTES
        sizes = [size for size in BUCKETS if self.grad_bytes > (size if size < BUCKET_BYTES else usual)]
        return [replace(means, bucket_bytes=size) for size in sizes if size != means.bucket_bytes]

    def _passes(self, means: Means) -> list[Means]:
        share = -(-self.batch // means.first_mesh.batch)
        half = min(share, means.micro_batch or share) // 2
        return [replace(means, micro_batch=half)] if half else []


def changed(crew: Means, means: Means) -> str:
    """In what ``means`` differ from those of ``crew``, in words."""
    before, after = plain(crew), plain(means)
    return ", ".join(f"{name} {value}" for name, value in after.items() if before.get(name) != value)


def plain(means: Means) -> Mapping[str, object]:
    """Means by name, the mesh as it comes out."""
    return {**means.to_json(), "mesh": str(means.first_mesh)}


def in_words(found: Sequence[ThroughputTuned]) -> str:
    """What came of all crews, in one sentence; "" where none was tuned."""
    taken = [
        f"{own.means['workers']} by {chosen.changed} ({own.step_s / chosen.step_s:.2f} times as fast, timed again)"
        for own, chosen in (each.tried[-2:] for each in found if each.chosen)
        if chosen.step_s and own.step_s
    ]
    if not found:
        return ""
    runs = sum(len(each.tried) for each in found)
    other = sum(timed.same is False for each in found for timed in each.tried)
    words = f"throughput: of {runs} short runs, {other} of them with other bits and so not taken, the fastest means: "
    return words + ("; ".join(taken) if taken else "those asked for")
