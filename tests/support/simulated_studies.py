"""Simulated studies of a program's own surrogate, whose controller may die at any record of its journal."""

from __future__ import annotations

from elastune.core.journal.records import Record
from elastune.train.program.load import load
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.request import StudyRequest


class KilledError(BaseException):
    """The controller dies here: nothing in the package catches it."""


def simulate_until(
    asked: StudyRequest, records: int | None = None, *, start_s: float = 1.0, resize_pause_s: float = 0.0
) -> bool:
    """A controller's life, which ends right after so many records (None: with the study).

    Args:
        asked: the study, of a program that has a ``surrogate``.
        records: of this life, not of the whole journal.
        start_s: as ``SurrogateModel`` has it.
        resize_pause_s: likewise.

    Returns:
        Whether it was killed.

    Raises:
        UserError: for a request that is wrong.
    """
    left = records

    def observe(record: Record) -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left <= 0:
                raise KilledError

    surrogate = load(asked.program).surrogate
    assert surrogate is not None
    try:
        simulate(asked, SurrogateModel(surrogate, start_s=start_s, resize_pause_s=resize_pause_s), observe=observe)
    except KilledError:
        return True
    return False
