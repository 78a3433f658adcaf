"""The strategy that brings a run's learners together, and how often: "local:learners=8,every=16"."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from elastune.core.errors import UserError
from elastune.core.slots import cut

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
"""What ``every`` is where a text does not say it and learners meet within a round."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "local": (*_ROUNDS, "send", *_QUORUM),
    "diloco": (*_ROUNDS, "send", "outer_lr", "outer_momentum", "fragments", "cycles", "delay", "blend", *_QUORUM),
    "averaging": (*_ROUNDS, "mix", "pull"),
    "gossip": (*_ROUNDS, "mix"),
    "pair_averaging": (*_ROUNDS, "mix"),
    "parameter_server": (*_ROUNDS, "staleness"),
}
"""What each strategy can be told."""


@dataclass(frozen=True)
class SyncPlan:
    """How workers agree. This is meaning, not means.

    Learners differ between two exchanges, so all settings here show in the result. The number of workers that carry the
    learners does not. With every strategy but ``allreduce``, each learner takes steps of its own, and after a *round*
    of steps all learners become one again:

    - ``allreduce``: synchronous SGD, with one learner, whose gradient is that of the whole batch.
    - ``local``: they become their mean (local SGD: Stich, ICLR 2019, arXiv 1805.09767; Lin et al., ICLR 2020, arXiv
      1808.07217).
    - ``diloco``: the way from the round's beginning to their mean is the gradient of an outer step with Nesterov's
      momentum (Douillard et al., arXiv 2311.08105). With ``fragments``, parts of the model take this step within a
      round, while training goes on (Streaming DiLoCo: Douillard et al., arXiv 2501.18512).
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
        strategy: One of these.
        learners: The number of learners that the slots of a global batch are divided into.
        every: Global batches of a round: each learner's own steps. A text that does not name it means 1, or 16 where
            learners meet within a round, too.
        moments: What becomes of the optimizer's state where a round ends. "mean": that of all learners, as of
            parameters. "fresh": every round begins without a state, and none is sent.
        send: To what numbers are rounded where a round ends, as the ways that they have come since it began. "whole":
            they are not. "bf16", "int8": to two bytes, or one. "int4": parameters to half a byte, the optimizer's state
            to one.
        mix: Global batches between two mixes within a round; fewer than ``every``.
        pull: How far a learner goes towards the mean in a mix: 0 to 1.
        outer_lr, outer_momentum: Learning rate and momentum of the outer step.
        staleness: Global batches after which a learner's step reaches the others, while they go on; at most
            ``every`` - 2, so that one does before the round ends.
        fragments, cycles: The number of parts of nearly equal bytes that the model is cut into, and how often in a
            round each of them is exchanged, its end included.
        delay: Global batches from the sending of a fragment until its outer step is adopted.
        blend: How much of a learner's own values stays then: 0, the outer step replaces them, to 1.
        quorum: Learners that a round needs; 0: all. Where a worker was lost in the round or came too late, the round
            ends as the mean of the learners that are there (after Decoupled DiLoCo, arXiv 2604.21428).
        grace: Once a quorum has taken the round's steps, how long it waits for the others, in seconds; at least half of
            what the round took it.

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
            raise UserError("moments are taken as a mean, or begun anew", repr(self.moments), "moments=mean or =fresh")
        if self.send not in get_args(Send):
            raise UserError("numbers are sent whole, or rounded", repr(self.send), "send=whole, =bf16, =int8 or =int4")
        own = SETTINGS[self.strategy]
        changed = [each.name for each in fields(self)[1:] if getattr(self, each.name) != each.default]
        if foreign := [name for name in changed if name not in own]:
            has = f"its settings are {', '.join(own)}" if own else "leave settings out, or use another strategy"
            raise UserError(f"{self.strategy} has no setting {foreign[0]}", self._told(foreign[0]), has)
        if self.strategy == "parameter_server" and self.staleness == 0 and changed != ["strategy"] and changed:
            rule = "a parameter server without staleness has one learner, and its steps are those of all-reduce"
            raise UserError(rule, self._told(changed[0]), "leave settings out, or give staleness=1 or more")
        if not self.streams and (alone := [name for name in ("delay", "blend") if name in changed]):
            rule = "where nothing is exchanged within a round nothing arrives late"
            raise UserError(rule, self._told(alone[0]), "give fragments=4, or leave it out")
        if self.streams and (each := self.every // (self.cycles * self.fragments)) <= self.delay:
            rule = "a fragment must be adopted before the next one leaves"
            told = f"every={self.every}, fragments={self.fragments}, cycles={self.cycles}, delay={self.delay}"
            fix = (
                f"use delay={each - 1}"
                if each > 1
                else f"use every={(self.delay + 1) * self.cycles * self.fragments} or more"
            )
            raise UserError(rule, told, fix)
        self._check_mixing()
        if self.quorum > self.learners:
            told = f"quorum={self.quorum}, learners={self.learners}"
            raise UserError("a quorum is of a run's learners", told, f"use quorum={self.learners} or less")
        if self.quorum and self.streams:
            rule = "learners that have a quorum meet only where a round ends"
            raise UserError(rule, f"quorum={self.quorum}, fragments={self.fragments}", "leave one of them out")
        if self.send != "whole" and (self.quorum or self.streams):
            rule, other = (
                "numbers are rounded where all learners meet at once",
                "quorum" if self.quorum else "fragments",
            )
            told = f"send={self.send} with {other}={getattr(self, other)}"
            raise UserError(rule, told, "leave one of them out")
        if "grace" in changed and not self.quorum:
            raise UserError("grace is how long a quorum waits for the rest", self._told("grace"), "give quorum=3, too")

    def _check_mixing(self) -> None:
        """Refuse rounds that are over before learners have met within them: ``local`` by another name."""
        least = self.mix + 1 if "mix" in SETTINGS[self.strategy] else self.staleness + 2 if self.staleness else 1
        if self.every >= least:
            return
        setting = "staleness" if self.staleness else "mix"
        told = f"{self.strategy}, every={self.every}, {setting}={getattr(self, setting)}"
        fix = f"use every={least} or more, or local:learners={self.learners},every={self.every}, which does the same"
        raise UserError("learners must hear of each other before their round ends", told, fix)

    @classmethod
    def parse(cls, text: str, **own: Any) -> SyncPlan:
        """Return the plan that ``text`` names, in the words of ``str`` or of a user.

        Args:
            text: The strategy and its settings.
            own: Settings that replace those of ``text``.

        Raises:
            UserError: For a text that is no plan.
        """
        is_text = isinstance(text, str)
        if not is_text:
            raise UserError("a synchronisation strategy is a text", repr(text)[:100], _EXAMPLE)
        strategy, _, settings = text.strip().partition(":")
        kinds: dict[str, type] = {each.name: type(each.default) for each in fields(cls)[1:]}
        found: dict[str, int | float | str] = {}
        for setting in filter(None, settings.split(",")):
            name, _, value = (part.strip() for part in setting.partition("="))
            if name not in kinds or name in found or not re.fullmatch(_WRITTEN[kinds[name]], value):
                rule = f"a strategy's settings are {', '.join(kinds)}, each once"
                raise UserError(rule, setting, _EXAMPLE)
            found[name] = kinds[name](value)
        told = {**found, **own}
        if "every" not in told and ("mix" in SETTINGS.get(strategy, ()) or told.get("staleness", 0)):
            found["every"] = MIXING_EVERY
        return cls(strategy, **{**found, **own})  # type: ignore[arg-type]  # checked there

    def __str__(self) -> str:
        changed = {each.name for each in fields(self) if getattr(self, each.name) != each.default}
        always = ("learners", "every") if self.in_rounds else ()
        told = [name for name in SETTINGS[self.strategy] if name in changed or name in always]
        return self.strategy + (":" if told else "") + ",".join(map(self._told, told))

    def _told(self, name: str) -> str:
        value = getattr(self, name)
        return f"{name}={float(value)!r}" if name in REAL else f"{name}={value}"

    @property
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

    @property
    def spares(self) -> bool:
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
            told = f"{self.learners} learners, up to {most_workers} workers"
            raise UserError("there must be a learner for every worker", told, "use more learners or fewer workers")
        if mechanism != "replicated":
            told = f"{self} with {mechanism}"
            raise UserError("a learner lies whole on its worker", told, "use --mechanism replicated")
        if self.quorum and mode != "fast":
            rule = "who comes too late for a quorum shows in the result, which exact mode rules out"
            raise UserError(rule, f"{self}, {mode} mode", "use --mode fast, or leave quorum out")

    def check_quorum(self, *, elastic: bool) -> None:
        """Raise ``UserError`` where a round may end without workers, in a run whose workers are not ``elastic``."""
        if self.quorum and not elastic:
            rule = "a lost worker ends the run where a launcher has started the workers, so no round can end without it"
            raise UserError(rule, str(self), "use elastune run --workers, or leave quorum out")


_WRITTEN: dict[type, str] = {
    int: r"[0-9]{1,9}",
    float: r"[0-9]{1,9}(\.[0-9]{1,20})?(e-?[0-9]{1,2})?",  # whatever repr gives of one that is allowed
    str: r"[a-z]+[0-9]*",
}
