"""Which trials' weights and predictions stay when the trials are over: a rule names them, the most wanted first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from elastune.core.errors import UserError
from elastune.search.analysis.front import nondominated

Standing = Mapping[int, tuple[float, ...]]
"""The values of the complete trials so far, by number; smaller is better."""
Apart = Callable[[int, int], float | None]
"""By how much the predictions of two trials differ; None: nobody knows."""
KEEP_NOTHING = "none"
_RULE = "what is kept is none, all, front, best, best:K, diverse, diverse:K or last:K, joined by +"
DIVERSE = 8
_FIX = 'such as --keep "front+last:3"'


class Retention(Protocol):
    """A rule. It is asked whenever a trial has ended well, because that trial may have overtaken others."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        """Return the trials of ``ended`` (the newest last) whose folders stay; where not all fit, the first ones do."""
        ...


@dataclass(frozen=True)
class KeepNothing:
    """``none``: nothing stays but the results in the journal."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        return []


@dataclass(frozen=True)
class KeepAll:
    """``all``: everything stays, the best first.

    It is for studies whose later trials begin with earlier ones, or where nobody knows yet what will be wanted.
    """

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        return list(dict.fromkeys([*by_rank(standing), *reversed(ended)]))


@dataclass(frozen=True)
class KeepFront:
    """``front``: the trials that no other dominates stay."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        return by_rank(standing, layers=1)


@dataclass(frozen=True)
class KeepBest:
    """``best:K``: the best ``count`` trials by each objective stay."""

    count: int = 1

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        found: dict[int, None] = {}

        def by(axis: int) -> list[int]:
            return sorted(standing, key=lambda number: standing[number][axis])

        ranked = [by(axis) for axis in range(len(next(iter(standing.values()), ())))]
        for place in range(self.count):
            found |= dict.fromkeys(order[place] for order in ranked if place < len(order))
        return list(found)


@dataclass(frozen=True)
class KeepLast:
    """``last:K``: the ``count`` trials that ended last stay, whatever they reached."""

    count: int = 1

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        return list(reversed(ended))[: self.count]


@dataclass(frozen=True)
class KeepDiverse:
    """``diverse:K``: the best trial stays, and others that differ most in what they predict, ``count`` together.

    They are for members of an ensemble. They are chosen one after another: each is the trial that is furthest from the
    nearest of those before. Only the better half of the trials counts, or the best ``count`` where those are more,
    because a trial that has learnt nothing differs most.
    """

    count: int = DIVERSE

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        ranked = by_rank(standing)
        rest = ranked[: max(self.count, len(ranked) // 2)]
        found, rest = rest[:1], rest[1:]
        while len(found) < self.count:
            far = {number: _nearest([apart(number, other) for other in found]) for number in rest}
            best = max(rest, key=lambda number: far[number], default=None)
            if best is None or far[best] < 0:
                break
            found.append(best)
            rest.remove(best)
        return found


@dataclass(frozen=True)
class KeepAny:
    """``A+B``: whatever one of ``rules`` keeps stays; the trials of the first rule come first."""

    rules: tuple[Retention, ...]

    def chosen(self, ended: Sequence[int], standing: Standing, apart: Apart) -> list[int]:
        return list(dict.fromkeys(number for rule in self.rules for number in rule.chosen(ended, standing, apart)))


def parse_retention(text: str) -> Retention:
    """Return the rule that ``text`` names, as for ``--keep``. Raises ``UserError``."""
    parts = [part.strip() for part in text.split("+")]
    if parts == [KEEP_NOTHING]:
        return KeepNothing()
    rules = tuple(_one(part, text) for part in parts)
    return rules[0] if len(rules) == 1 else KeepAny(rules)


def retention_of(keep: str, most_bytes: int | None, *, population: bool) -> Retention:
    """Return the rule ``keep``, within ``most_bytes`` of the disk.

    Raises:
        UserError: For a text that is no rule, and for a rule without what a ``population`` needs: its members begin
            with one another's checkpoints.
    """
    asked = parse_retention(keep)
    if most_bytes is not None and (asked == KeepNothing() or most_bytes < 1):
        fix = "leave it out, or say what to keep, such as --keep best:8 --keep-size 2GB"
        raise UserError("a bound is for what --keep keeps, and above 0", most_bytes, fix)
    if not population:
        return asked
    if asked not in (KeepNothing(), KeepAll()) or most_bytes is not None:
        rule = "members of a population begin with one another's checkpoints, so all stay"
        raise UserError(rule, f"--keep {keep}", "use --keep all, without --keep-size")
    return KeepAll()


def _one(part: str, text: str) -> Retention:
    name, colon, told = part.partition(":")
    if name in ("all", "front") and not colon:
        return KeepAll() if name == "all" else KeepFront()
    count = int(told) if told.isascii() and told.isdecimal() and len(told) < 7 else 0
    if name == "best" and (count or not colon):
        return KeepBest(count or 1)
    if name == "diverse" and (count > 1 or not colon):
        return KeepDiverse(count or DIVERSE)
    if name == "last" and count:
        return KeepLast(count)
    raise UserError(_RULE, repr(text)[:80], _FIX)


def _nearest(distances: Sequence[float | None]) -> float:
    """The smallest; -1 where one is not known."""
    return min(-1.0 if found is None else found for found in distances)


def by_rank(standing: Standing, layers: int | None = None) -> list[int]:
    """Return the trials front by front: those that no other dominates, then the front of the rest, and so on.

    Within one front, the better by the first objective comes first.

    Args:
        standing: The trials and their values.
        layers: The number of fronts; None: all.
    """
    rest, found = dict(standing), []
    while rest and layers != 0:
        best = nondominated(np.array(list(rest.values()), dtype=float))
        front = [number for number, on_front in zip(rest, best, strict=True) if on_front]
        if not front:  # such as values that are not numbers
            break
        found += sorted(front, key=lambda number: standing[number])
        rest = {number: values for number, values in rest.items() if number not in set(front)}
        layers = None if layers is None else layers - 1
    return found
