"""Ranks that do not do the same, told in one line: which rank is where."""

from __future__ import annotations

from collections.abc import Mapping

from elastune.core.errors import UserError

MOST_NAMED = 8  # different things, of as many ranks as there are


def ranks_differ(step: int, doing: Mapping[int, str]) -> UserError:
    """What to raise where ranks, after ``step`` completed steps, are ``doing`` what does not go together."""
    rule = "all ranks must make the same session calls in the same order"
    fix = "let no rank skip or add one; decide by what session.mean gives, which is equal on all"
    return UserError(rule, f"after step {step}, {told_by_rank(doing)}", fix)


def told_by_rank(told: Mapping[int, str]) -> str:
    """ "rank 0 in this; ranks 1, 2 in that": ranks of which the same is told are named together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(told.items()):
        ranks.setdefault(text, []).append(rank)
    parts = [f"{_names(of)} {text}" for text, of in list(ranks.items())[:MOST_NAMED]]
    return "; ".join(parts)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
