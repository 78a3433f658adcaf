"""Whether a policy that switches is worth it: in no phase more than 5 % behind the best fixed strategy in samples a
second at equal final accuracy, and ahead of all over the whole run. Pure.

A fixed strategy counts as equal in accuracy, or better, where its mean is no lower than the lower end of the policy's
interval: the others are not what the policy has to keep up with, since they pay with accuracy for their pace. The
policy has to be as accurate as every fixed one: its mean no lower than the lower end of that one's interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from elastune.core.plan.confidence_intervals import mean_ci

BEHIND = 0.05
Row = dict[str, Any]


def cell(rows: Sequence[Row], phases: int) -> Row:
    """Medians of one strategy's runs, one a seed; accuracy with its 95 % interval (None of one seed)."""
    accuracy, half = mean_ci([row["accuracy"] for row in rows])
    whole = [row["whole"] for row in rows]
    paces = [round(statistics.median(row["phases"][at] for row in rows)) for at in range(phases)]
    results = {"phases": paces, "whole": round(statistics.median(whole)), "whole_of_seeds": whole}
    return results | {"accuracy": accuracy, "accuracy_ci": half, "seeds": len(rows)}


def as_accurate(one: Row, other: Row) -> bool:
    """Whether ``one`` is no less accurate than ``other``, as far as that one's interval tells."""
    assert other["accuracy_ci"] is not None
    return bool(one["accuracy"] >= other["accuracy"] - other["accuracy_ci"])


def judge(policy: Row, fixed: Mapping[str, Row]) -> Row:
    """How far ``policy`` is behind the best of the ``fixed`` in each phase, how far ahead over the whole run, and
    whether that meets the goal: ``met`` is None where one seed alone leaves nothing to say of accuracy.

    ``left_out``: the fixed ones that are less accurate. ``more_accurate``: those that the policy is less accurate than.
    """
    known = all(each["accuracy_ci"] is not None for each in (policy, *fixed.values()))
    left_out = [name for name, each in fixed.items() if known and not as_accurate(each, policy)]
    more = [name for name, each in fixed.items() if known and not as_accurate(policy, each)]
    rivals = [each for name, each in fixed.items() if name not in left_out]
    results: Row = {"left_out": left_out, "more_accurate": more}
    if not rivals:
        return results | {"behind_best_fixed": None, "whole_over_best_fixed": None, "met": None}
    best = [max(paces) for paces in zip(*(each["phases"] for each in rivals), strict=True)]
    behind = [round(1 - ours / theirs, 3) for ours, theirs in zip(policy["phases"], best, strict=True)]
    ahead = policy["whole"] / max(each["whole"] for each in rivals)
    met = max(behind) <= BEHIND and ahead > 1 and not more if known else None
    return results | {"behind_best_fixed": behind, "whole_over_best_fixed": round(ahead, 3), "met": met}


def words(name: str, judged: Row) -> str:
    """One line of it."""
    verdict = {True: "met", False: "MISSED", None: "not shown: accuracy of one seed has no interval"}[judged["met"]]
    if judged["behind_best_fixed"] is None:
        return f"{name}: no fixed strategy is as accurate: {verdict}"
    less = f"less accurate than {', '.join(judged['more_accurate'])}, " if judged["more_accurate"] else ""
    out = f" (without {', '.join(judged['left_out'])}, less accurate)" if judged["left_out"] else ""
    behind = ", ".join(f"{100 * each:.1f}" for each in judged["behind_best_fixed"])
    whole = judged["whole_over_best_fixed"]
    return (
        f"{name}: {less}{behind} % behind the best fixed one by phase{out}, {whole} of it over the whole run: {verdict}"
    )
