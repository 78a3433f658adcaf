"""How the learners of a run are kept in sync: strategy, settings, and the schedule by which strategies change.

``SyncPlan`` is one strategy with its settings ("local:learners=8,every=16"). ``SyncSchedule`` replaces it after given
steps. ``SyncChoice`` is what a search space can choose. A strategy decides the result, so it is a hyperparameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args

from elastune.core.errors import UserError
from elastune.core.slots import cut

# One strategy and its settings: "local:learners=8,every=16".

Strategy = Literal["allreduce", "local", "diloco", "averaging", "gossip", "pair_averaging", "parameter_server"]
Moments = Literal["mean", "fresh"]
Send = Literal["whole", "bf16", "int8", "int4"]
WHOLE = {
    "learners": (1, 1_024),
    "every": (1, 1_000_000),
    "mix": (1, 1_000_000),
    "staleness": (0, 64),
    "fragments": (1, 64),
    "cycles": (1, 10_000),
    "delay": (1, 1_000_000),
    "quorum": (0, 1_024),
}
REAL = {
    "pull": (0.0, 1.0),
    "outer_lr": (0.0, 10.0),
    "outer_momentum": (0.0, 0.999),
    "blend": (0.0, 1.0),
    "grace": (0.0, 3_600.0),
}
_EXAMPLE = 'such as "local:learners=8,every=16"'
_ROUNDS = ("learners", "every", "moments")
_QUORUM = ("quorum", "grace")
MIXING_EVERY = 16
"""The default of ``every`` where learners meet within a round."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "local": (*_ROUNDS, "send", *_QUORUM),
    "diloco": (*_ROUNDS, "send", "outer_lr", "outer_momentum", "fragments", "cycles", "delay", "blend", *_QUORUM),
    "averaging": (*_ROUNDS, "mix", "pull"),
    "gossip": (*_ROUNDS, "mix"),
    "pair_averaging": (*_ROUNDS, "mix"),
    "parameter_server": (*_ROUNDS, "staleness"),
}
"""The settings of each strategy."""


@dataclass(frozen=True)
class SyncPlan:
    """How the learners of a run agree: a strategy and its settings. These are hyperparameters.

    Learners differ between two exchanges, so all settings here show in the result. The number of workers that carry the
    learners does not. With every strategy but ``allreduce``, each learner takes steps of its own, and after a *round*
    of steps all learners become one again:

    - ``allreduce``: synchronous SGD, with one learner, whose gradient is that of the whole batch.
    - ``local``: they become their mean (local SGD: Stich, ICLR 2019, arXiv 1805.09767; Lin et al., ICLR 2020, arXiv
      1808.07217).
    - ``diloco``: the displacement from the round's beginning to their mean is the gradient of an outer step with
      Nesterov's momentum (Douillard et al., arXiv 2311.08105). With ``fragments``, parts of the model take this step
      within a round, while training goes on (Streaming DiLoCo: Douillard et al., arXiv 2501.18512).
    - ``averaging``, ``gossip`` and ``pair_averaging`` mix parameters within a round, too, and end it by the mean (as
      Chen et al., ICML 2021, arXiv 2105.09080, do). ``averaging`` pulls each learner towards the mean of all
      (synchronous model averaging: Koliousis et al., VLDB 2019; Mai et al., OSDI 2020). ``gossip`` takes the mean with
      one neighbour of an exponential graph (Assran et al., ICML 2019, arXiv 1811.10792). ``pair_averaging`` takes the
      mean of pairs that are drawn anew each time (after Lian et al., ICML 2018, arXiv 1710.06952; in step, in ``fast``
      mode asynchronously).
    - ``parameter_server``: without ``staleness``, the steps of all-reduce, with sums made by servers, which are the
      workers themselves. With it, each learner's step reaches the others that much later (stale synchronous parallel:
      Ho et al., NeurIPS 2013).

    Args:
        strategy: The name of a strategy.
        learners: The number of learners that the slots of a global batch are divided into.
        every: Global batches of a round: each learner's own steps. The default is 1, or 16 where learners meet within a
            round, too.
        moments: What becomes of the optimizer's state where a round ends. "mean": the mean of all learners, as of
            parameters. "fresh": every round begins without a state, and none is sent.
        send: How displacements since the beginning of the round are rounded where it ends. "whole": not at all. "bf16",
            "int8": to two bytes, or one. "int4": parameters to half a byte, the optimizer's state to one.
        mix: Global batches between two mixes within a round; fewer than ``every``.
        pull: How far a learner moves towards the mean in a mix: 0 to 1.
        outer_lr, outer_momentum: Learning rate and momentum of the outer step.
        staleness: Global batches after which a learner's step reaches the others; at most ``every`` - 2, so that one
            step arrives before the round ends.
        fragments, cycles: The number of parts of nearly equal bytes that the model is cut into, and how often in a
            round each of them is exchanged, its end included.
        delay: Global batches from the sending of a fragment until its outer step is adopted.
        blend: The share of a learner's own values that stays then, from 0 (the outer step replaces them) to 1.
        quorum: Learners that a round needs; 0: all. Where a worker was lost in the round or came too late, the round
            ends as the mean of the present learners (after Decoupled DiLoCo, arXiv 2604.21428).
        grace: Seconds that a quorum waits for the other learners after the round's steps; at least half the time of the
            round.

    Raises:
        UserError: For impossible numbers, and for settings that the strategy does not have.

    Example:
        >>> SyncPlan.parse("local:learners=8,every=16").every
        16
    """

    strategy: Strategy = "allreduce"
    learners: int = 1
    every: int = 1
    moments: Moments = "mean"
    send: Send = "whole"
    mix: int = 1
    pull: float = 0.1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    staleness: int = 0
    fragments: int = 1
    cycles: int = 1
    delay: int = 2
    blend: float = 0.0
    quorum: int = 0
    grace: float = 1.0

    def __post_init__(self) -> None:
        if self.strategy not in SETTINGS:
            raise UserError("a synchronisation strategy must be known", self.strategy, f"use {' or '.join(SETTINGS)}")
        for name, (least, most) in WHOLE.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"{name} must be a whole number from {least} to {most:,}", repr(value), _EXAMPLE)
        for name, (low, high) in REAL.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise UserError(f"{name} must be a number from {low:g} to {high:g}", repr(value), f"{name}=0.5")
        if self.moments not in get_args(Moments):
            raise UserError(
                "moments are the mean of all learners, or fresh", repr(self.moments), "moments=mean or =fresh"
            )
        if self.send not in get_args(Send):
            raise UserError("numbers are sent whole, or rounded", repr(self.send), "send=whole, =bf16, =int8 or =int4")
        known = SETTINGS[self.strategy]
        changed = [each.name for each in fields(self)[1:] if getattr(self, each.name) != each.default]
        if foreign := [name for name in changed if name not in known]:
            has = f"its settings are {', '.join(known)}" if known else "leave settings out, or use another strategy"
            raise UserError(f"{self.strategy} has no setting {foreign[0]}", self._setting_text(foreign[0]), has)
        if self.strategy == "parameter_server" and self.staleness == 0 and changed != ["strategy"] and changed:
            rule = "a parameter server without staleness has one learner, and its steps are those of all-reduce"
            raise UserError(rule, self._setting_text(changed[0]), "leave settings out, or give staleness=1 or more")
        if not self.streams and (alone := [name for name in ("delay", "blend") if name in changed]):
            rule = "delay and blend need fragments, which are exchanged within a round"
            raise UserError(rule, self._setting_text(alone[0]), "give fragments=4, or leave it out")
        if self.streams and (each := self.every // (self.cycles * self.fragments)) <= self.delay:
            rule = "a fragment must be adopted before the next one leaves"
            value_text = f"every={self.every}, fragments={self.fragments}, cycles={self.cycles}, delay={self.delay}"
            fix = (
                f"use delay={each - 1}"
                if each > 1
                else f"use every={(self.delay + 1) * self.cycles * self.fragments} or more"
            )
            raise UserError(rule, value_text, fix)
        self._check_mixing()
        if self.quorum > self.learners:
            value_text = f"quorum={self.quorum}, learners={self.learners}"
            raise UserError(
                "a quorum has at most as many learners as the run", value_text, f"use quorum={self.learners} or less"
            )
        if self.quorum and self.streams:
            rule = "learners with a quorum meet only where a round ends"
            raise UserError(rule, f"quorum={self.quorum}, fragments={self.fragments}", "leave one of them out")
        if self.send != "whole" and (self.quorum or self.streams):
            rule, other = (
                "send rounds numbers only where all learners meet at once",
                "quorum" if self.quorum else "fragments",
            )
            value_text = f"send={self.send} with {other}={getattr(self, other)}"
            raise UserError(rule, value_text, "leave one of them out")
        if "grace" in changed and not self.quorum:
            raise UserError(
                "grace is how long a quorum waits for the rest", self._setting_text("grace"), "give quorum=3, too"
            )

    def _check_mixing(self) -> None:
        """Refuse rounds that end before learners have met within them: they would be ``local`` by another name."""
        least = self.mix + 1 if "mix" in SETTINGS[self.strategy] else self.staleness + 2 if self.staleness else 1
        if self.every >= least:
            return
        setting = "staleness" if self.staleness else "mix"
        value = f"{self.strategy}, every={self.every}, {setting}={getattr(self, setting)}"
        fix = f"use every={least} or more, or local:learners={self.learners},every={self.every}, which does the same"
        raise UserError("learners must meet before their round ends", value, fix)

    @classmethod
    def parse(cls, text: str, **replacing: Any) -> SyncPlan:
        """Return the plan that ``text`` names; ``str`` of a plan is such a text.

        Args:
            text: The strategy and its settings.
            replacing: Settings that replace those of ``text``.

        Raises:
            UserError: For a text that is no plan.
        """
        is_text = isinstance(text, str)
        if not is_text:
            raise UserError("a synchronisation strategy is a text", repr(text)[:100], _EXAMPLE)
        strategy, _, settings = text.strip().partition(":")
        kinds: dict[str, type] = {each.name: type(each.default) for each in fields(cls)[1:]}
        settings_read: dict[str, int | float | str] = {}
        for setting in filter(None, settings.split(",")):
            name, _, value = (part.strip() for part in setting.partition("="))
            if name not in kinds or name in settings_read or not re.fullmatch(_WRITTEN[kinds[name]], value):
                rule = f"a strategy's settings are {', '.join(kinds)}, each once"
                raise UserError(rule, setting, _EXAMPLE)
            settings_read[name] = kinds[name](value)
        merged = {**settings_read, **replacing}
        if "every" not in merged and ("mix" in SETTINGS.get(strategy, ()) or merged.get("staleness", 0)):
            settings_read["every"] = MIXING_EVERY
        return cls(strategy, **{**settings_read, **replacing})  # type: ignore[arg-type]  # checked there

    def __str__(self) -> str:
        changed = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        always = ("learners", "every") if self.in_rounds else ()
        shown = [name for name in SETTINGS[self.strategy] if name in changed or name in always]
        return self.strategy + (":" if shown else "") + ",".join(map(self._setting_text, shown))

    def _setting_text(self, name: str) -> str:
        value = getattr(self, name)
        return f"{name}={float(value)!r}" if name in REAL else f"{name}={value}"

    @cached_property
    def in_rounds(self) -> bool:
        """Whether workers meet after the optimizer's step, once a round, and not in each backward pass."""
        return self.strategy not in ("allreduce", "parameter_server") or self.staleness > 0

    @property
    def mixes(self) -> bool:
        """Whether learners meet within a round, too."""
        return "mix" in SETTINGS[self.strategy] or self.staleness > 0 or self.streams

    @property
    def streams(self) -> bool:
        """Whether fragments are exchanged within a round, while training goes on."""
        return self.cycles * self.fragments > 1

    @cached_property
    def has_quorum(self) -> bool:
        """Whether a round can end without some of its learners."""
        return 0 < self.quorum < self.learners

    def carried(self, workers: int, rank: int) -> range:
        """Return the learners that worker ``rank`` of ``workers`` trains."""
        return cut(self.learners, workers)[rank]

    def most_carried(self, workers: int) -> int:
        """Return the most learners that one of so many ``workers`` trains."""
        return max(map(len, cut(self.learners, workers)))

    def check(self, num_slots: int, most_workers: int, mechanism: str, mode: str) -> None:
        """Raise ``UserError`` where slots, workers, mechanism or mode do not go with the plan."""
        if not self.in_rounds:
            return
        if num_slots % self.learners:
            fix = f"use --slots {self.learners * max(1, round(num_slots / self.learners))}, or other learners"
            raise UserError("each learner must have as many slots", f"{self.learners} learners, {num_slots} slots", fix)
        if most_workers > self.learners:
            value = f"{self.learners} learners, up to {most_workers} workers"
            raise UserError("there must be a learner for every worker", value, "use more learners or fewer workers")
        if mechanism != "replicated":
            value = f"{self} with {mechanism}"
            raise UserError("a worker must hold its learners whole", value, "use --mechanism replicated")
        if self.quorum and mode != "fast":
            rule = "a quorum leaves late learners out, which changes results that exact mode fixes"
            raise UserError(rule, f"{self}, {mode} mode", "use --mode fast, or leave quorum out")

    def check_quorum(self, *, elastic: bool) -> None:
        """Raise ``UserError`` for a quorum in a run whose workers are not ``elastic``: it could not end a round without
        one.
        """
        if self.quorum and not elastic:
            rule = "a lost worker ends the run where a launcher has started the workers, so no round can end without it"
            raise UserError(rule, str(self), "use elastune run --workers, or leave quorum out")


_WRITTEN: dict[type, str] = {
    int: r"[0-9]{1,9}",
    float: r"[0-9]{1,9}(\.[0-9]{1,20})?(e-?[0-9]{1,2})?",  # whatever repr gives of one that is allowed
    str: r"[a-z]+[0-9]*",
}


# Strategies by step: "1000=local:learners=8,every=16; 5000=allreduce".

MOST_STEP = 10**12
_SCHEDULE_EXAMPLE = 'such as "1000=local:learners=8,every=16; 5000=allreduce"'


@dataclass(frozen=True)
class SyncSchedule:
    """A sequence of strategies: each one begins after a given step.

    Args:
        changes: Pairs of an ascending step and the strategy from there on.

    Raises:
        UserError: For steps that do not ascend.

    Example:
        >>> SyncSchedule.parse("1000=local:learners=8,every=16").due(1200)
        (1000, SyncPlan(strategy='local', learners=8, every=16, ...))
    """

    changes: tuple[tuple[int, SyncPlan], ...] = ()

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.changes]
        if steps != sorted(set(steps)) or not all(1 <= step <= MOST_STEP for step in steps):
            rule = "the steps of a schedule of strategies ascend, from 1 on"
            raise UserError(rule, ", ".join(map(str, steps)), _SCHEDULE_EXAMPLE)

    @classmethod
    def parse(cls, text: str) -> SyncSchedule:
        """Return the schedule that ``text`` names; ``str`` of a schedule is such a text. Raises ``UserError``."""
        is_text = isinstance(text, str)
        if not is_text:
            raise UserError("a schedule of strategies is a text", repr(text)[:100], _SCHEDULE_EXAMPLE)
        changes = []
        for entry in filter(None, (part.strip() for part in text.split(";"))):
            step, equals, plan = entry.partition("=")
            if not equals or not re.fullmatch("[0-9]{1,12}", step.strip()):
                raise UserError(
                    "a schedule of strategies is made of STEP=STRATEGY, with ; between", entry, _SCHEDULE_EXAMPLE
                )
            changes.append((int(step), SyncPlan.parse(plan)))
        return cls(tuple(changes))

    def __str__(self) -> str:
        return "; ".join(f"{step}={plan}" for step, plan in self.changes)

    def due(self, step: int) -> tuple[int, SyncPlan] | None:
        """Return the newest change after ``step`` steps: its own step and its strategy; None before the first."""
        return next((change for change in reversed(self.changes) if change[0] <= step), None)

    def next_after(self, step: int) -> int | None:
        """Return the step of the next change, which a round must not pass."""
        return next((at for at, _ in self.changes if at > step), None)

    def beyond(self, steps: int) -> SyncSchedule:
        """Return the changes that a run of so many ``steps`` does not reach. No strategy changes after the
        last step.
        """
        return SyncSchedule(tuple(change for change in self.changes if change[0] >= steps))

    def learners(self, first: SyncPlan) -> int:
        """Return the number of which the slots must be a multiple. The first strategy is ``first``."""
        return math.lcm(first.learners, *(plan.learners for _, plan in self.changes))


# The strategy and the schedule of a trial, as a space or a study chooses them.

SYNC_NAMES = ("sync", "sync_schedule")
"""The settings of a space that choose a strategy and a schedule."""
SETTING_NAMES = tuple(each.name for each in fields(SyncPlan)[1:])
"""The settings of strategies. Beside ``sync``, a space may set each of them: ``learners``, ``every``, ..."""
_CHOICE_EXAMPLES = dict(
    zip(SYNC_NAMES, ('such as "local:learners=8,every=16"', 'such as "1000=local:learners=8"'), strict=True)
)


@dataclass(frozen=True)
class SyncChoice:
    """A strategy to begin with, and a schedule of later ones.

    Example:
        >>> str(SyncChoice.of({"sync": "local", "learners": 8, "every": 16}).sync)
        'local:learners=8,every=16'
    """

    sync: SyncPlan = field(default_factory=SyncPlan)
    schedule: SyncSchedule = field(default_factory=SyncSchedule)

    @classmethod
    def parse(cls, sync: str, schedule: str) -> SyncChoice:
        """Return the choice that ``--sync`` and ``--sync-schedule`` name. Raises ``UserError``."""
        return cls(SyncPlan.parse(sync), SyncSchedule.parse(schedule))

    @classmethod
    def of(cls, values: Mapping[str, Any], program_names: Collection[str] = ()) -> SyncChoice:
        """Return the choice that ``values`` of a space make; all-reduce where they choose nothing.

        Args:
            values: The values of a space by name. A strategy's setting under its own name replaces the setting in the
                strategy's text; None is left out.
            program_names: Names that are the program's own settings, so not those of a strategy.

        Raises:
            UserError: For an unknown strategy, and settings that it does not have.
        """
        texts = {
            "sync": "allreduce",
            "sync_schedule": "",
            **{name: values[name] for name in SYNC_NAMES if name in values},
        }
        for name, text in texts.items():
            if not isinstance(text, str):
                raise UserError(f"a trial's {name} must be a text", repr(text)[:100], _CHOICE_EXAMPLES[name])
        settings = {name: values[name] for name in strategy_settings(values, program_names) if values[name] is not None}
        return cls(SyncPlan.parse(texts["sync"], **settings), SyncSchedule.parse(texts["sync_schedule"]))

    def to_json(self) -> dict[str, str]:
        """Return the two texts that a journal holds."""
        return {"sync": str(self.sync), "sync_schedule": str(self.schedule)}

    def numbers(self, program_names: Collection[str] = ()) -> dict[str, int]:
        """Return the numbers that constraints may use, without ``program_names``, which are the program's own."""
        numbers = {"learners": self.sync.learners, "every": self.sync.every}
        return {name: value for name, value in numbers.items() if name not in program_names}

    def slots(self, least: int) -> int:
        """Return the fewest slots, from ``least`` on, that the learners of every strategy can share equally."""
        learners = self.schedule.learners(self.sync)
        return -(-least // learners) * learners


def chooses(values: Mapping[str, Any]) -> bool:
    """Return whether ``values`` choose a strategy or a schedule."""
    return any(name in values for name in SYNC_NAMES)


def strategy_settings(values: Mapping[str, Any], program_names: Collection[str]) -> list[str]:
    """Return the names in ``values`` that are settings of a strategy; none where no strategy is chosen."""
    return [name for name in SETTING_NAMES if name in values and name not in program_names] if chooses(values) else []


def in_full(values: Mapping[str, Any], program_names: Collection[str]) -> dict[str, Any]:
    """Return ``values`` with the whole text of the chosen strategy, and with ``learners`` and ``every``.

    Values without a choice, or with an impossible one (which refuses the trial), stay as they are. ``program_names``:
    the program's own settings.
    """
    if not chooses(values):
        return dict(values)
    try:
        choice = SyncChoice.of(values, program_names)
    except UserError:
        return dict(values)
    return {**values, **choice.to_json(), **choice.numbers(program_names)}


# Fragments of a model, and the steps of a round after which each of them is exchanged.


def fragments_of(sizes_bytes: Sequence[int], count: int) -> list[list[int]]:
    """Return whole tensors in ``count`` fragments of nearly equal bytes: the largest first, each to the lightest
    fragment.

    Tensors differ in size by orders of magnitude, so runs of layers or strides through them would make large bursts.
    The result is the same on every worker.

    Args:
        sizes_bytes: The bytes of each tensor.

    Returns:
        The places of each fragment's tensors, in order.

    Raises:
        UserError: Where there are fewer tensors than fragments.
    """
    if len(sizes_bytes) < count:
        value = f"fragments={count}, {len(sizes_bytes)} parameters"
        raise UserError("each fragment must have a parameter tensor", value, "use fewer fragments")
    fragments: list[list[int]] = [[] for _ in range(count)]
    weights = [0] * count
    for place in sorted(range(len(sizes_bytes)), key=lambda place: (-sizes_bytes[place], place)):
        # By bytes, then by number: tensors without elements are spread, too, so that no fragment is empty.
        lightest = min(range(count), key=lambda each: (weights[each], len(fragments[each]), each))
        fragments[lightest].append(place)
        weights[lightest] += sizes_bytes[place]
    return [sorted(places) for places in fragments]


def send_schedule(every: int, fragments: int, cycles: int) -> dict[int, int]:
    """Return the fragment that leaves after each step of a round of ``every`` steps, ``cycles`` times each.

    They are evenly staggered, in turn. The last exchange is not among them: at the round's end all fragments are
    exchanged.

    Example:
        >>> send_schedule(200, 4, 1)
        {50: 0, 100: 1, 150: 2}
    """
    sent = cycles * fragments
    return {(turn + 1) * every // sent: turn % fragments for turn in range(sent - 1)}
