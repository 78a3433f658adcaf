"""For whom a frontier speaks: crews asked about, those that its search found, and by which means each goes fastest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastune.core.mechanism_name import MechanismName
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.core.sync_choice import SyncChoice
from elastune.core.sync_plan import SyncPlan
from elastune.core.text import byte_count
from elastune.frontier.crews import first_of
from elastune.frontier.ways import StepKind, Way

Standing = tuple[Mesh, str, str]
"""What makes two crews the same: their mesh, their mechanism, and by which routes their sums travel."""


class Lineup:
    """Crews, fewest workers first. ``asked``: those that the question is about; others join as the search finds them.

    ``base``: the means that were asked for, from which ways and kinds of steps are told apart.
    """

    def __init__(self, asked: Sequence[Means], base: Means) -> None:
        self.asked = tuple(asked)
        self.way = Way.of(base)
        self._base = base
        self._found: list[Means] = []
        self._faster: dict[Standing, Means] = {}

    @property
    def crews(self) -> tuple[Means, ...]:
        """All of them; of equal workers those asked about first."""
        return tuple(sorted((*self.asked, *self._found), key=lambda crew: crew.workers))

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts they cut a batch, ascending: quality depends on no more of a crew."""
        return tuple(sorted({crew.num_slots for crew in self.crews}))

    @property
    def widest(self) -> Means:
        """That of the most workers asked about."""
        return self.asked[-1]

    def first(self, parts: int) -> Means:
        """Who is trained, or at least timed, where a batch is cut into so many parts."""
        return first_of((*self.asked, *self._found), parts)

    def join(self, crew: Means) -> None:
        """Speak for ``crew``, too."""
        if standing_of(crew) not in map(standing_of, self.crews):
            self._found.append(crew)

    def without(self, parts: Collection[int]) -> Lineup:
        """The same without those asked about who cut a batch into so many ``parts``; one at least must be left."""
        left = Lineup([crew for crew in self.asked if crew.num_slots not in parts], self._base)
        left._found, left._faster = list(self._found), dict(self._faster)
        return left

    def speed_up(self, crew: Means, means: Means) -> None:
        """Run ``crew`` by ``means`` from now on, which give the same bits sooner, where it goes the way asked for."""
        self._faster[standing_of(crew)] = means

    def by(self, crew: Means, way: Way) -> Means:
        """The means of ``crew`` going ``way``."""
        faster = self._faster.get(standing_of(crew)) if way == self.way else None
        return way.on(crew) if faster is None else faster

    def kind(self, crew: Means, way: Way) -> StepKind:
        """What a step of it takes the time of."""
        return self.kind_of(self.by(crew, way), way.agreed)

    def kind_of(self, means: Means, agreed: SyncChoice | None = None) -> StepKind:
        """The same of means, whoever has them."""
        sync = (agreed or SyncChoice()).sync
        words = [*self._words(means), *([str(sync)] if sync.in_rounds else [])]
        passes = -(-sync.learners // means.first_mesh.batch)
        return StepKind(means.first_mesh, ", ".join(words), _every(sync), passes)

    def ways(self, crew: Means, way: Way) -> str:
        """What of the means is not as it was asked for, in words."""
        words = [self.kind(crew, way).apart, *(f"policy {text}" for text in way.policies)]
        return ", ".join(word for word in words if word)

    def _words(self, means: Means) -> list[str]:
        base, mesh = self._base, means.first_mesh
        asked = [crew.mechanism for crew in self.asked if crew.first_mesh == mesh]
        plain = asked[0] if asked else str(MechanismName.least_for(mesh, means.virtual_tensor))
        words = [means.mechanism] if means.mechanism != plain else []
        words += [means.mode] if means.mode != base.mode else []
        words += [means.compress or "not compressed"] if means.compress != base.compress else []
        words += [f"micro-batch {means.micro_batch or 'unbounded'}"] if means.micro_batch != base.micro_batch else []
        words += [f"{means.threads} threads"] if means.threads != base.threads else []
        words += [str(means.topology)] if means.workers > 1 and means.topology != base.topology else []
        words += [f"buckets of {byte_count(means.bucket_bytes)}"] if means.bucket_bytes != base.bucket_bytes else []
        words += [f"{means.copies} copies"] if means.copies not in (None, base.copies) else []
        words += [f"stage {means.zero_stage}"] if means.zero_stage not in (None, base.zero_stage) else []
        return [*words, *(["offload"] if means.offload and not base.offload else [])]


def standing_of(crew: Means) -> Standing:
    """What makes two crews the same."""
    return crew.first_mesh, crew.mechanism, str(crew.topology)


def _every(sync: SyncPlan) -> int:
    """Of how many steps one brings learners together: mixes count as whole exchanges, so do a cycle's fragments."""
    if not sync.in_rounds:
        return 1
    return sync.mix if sync.mixes and not sync.streams else max(1, sync.every // sync.cycles)
