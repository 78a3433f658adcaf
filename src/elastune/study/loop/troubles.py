"""What may go wrong in a study besides a single trial: a program without hope, or that was edited; a full disk."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.job.pool import JobEvent
from elastune.journal.records import RunFailed
from elastune.journal.trials import TrialLife, TrialTable
from elastune.study.trial_results import UNREPORTED
from elastune.train.checkpoints.checkpoint import UNWRITABLE
from elastune.train.data.seen import OTHER_DATA
from elastune.train.program.source import EDITED

HOPELESS_TRIALS = 5  # so many trials that raise, and none that does not, are a bug in the program


class Hope:
    """Gives up on a program whose first trials all raise, or all lack an objective."""

    def __init__(self) -> None:
        self._crashed_in_a_row = self._lacking_in_a_row = 0

    def ended(self, event: JobEvent, table: TrialTable) -> None:
        """A trial is over. Raises ``UserError`` where no trial is likely to succeed."""
        outcome = event.outcome
        crashed = isinstance(outcome, RunFailed) and outcome.reason in ("exception", "user_error")
        self._crashed_in_a_row = self._crashed_in_a_row + 1 if crashed else 0
        if self._crashed_in_a_row >= HOPELESS_TRIALS and isinstance(outcome, RunFailed) and not _works(table):
            rule = f"of the first {HOPELESS_TRIALS} trials one must not raise"
            raise UserError(rule, outcome.detail, f"fix the program; a log is {event.spec.out / 'logs'}")
        self._lacking_in_a_row = self._lacking_in_a_row + 1 if _lacks(table.trials[event.job]) else 0
        if self._lacking_in_a_row >= HOPELESS_TRIALS:
            self.over(table)

    def over(self, table: TrialTable) -> None:
        """There is nothing more to be tried. Raises ``UserError`` where trials have ended well, none with an
        objective."""
        if _works(table):
            return
        for life in table.trials.values():
            if life.finished is not None and _lacks(life):
                fix = "report it by session.report, or name another --objective"
                got = f"trial {life.number} {life.finished.reason}"
                raise UserError("an objective must be a metric that the program reports", got, fix)


def _lacks(life: TrialLife) -> bool:
    return life.finished is not None and life.finished.reason.startswith(UNREPORTED)


def _works(table: TrialTable) -> bool:
    """Whether some trial has shown that the program can be trained."""
    lives = table.trials.values()
    return any(life.state == "paused" or (life.finished and life.finished.state == "complete") for life in lives)


def changed_meanwhile(event: JobEvent) -> UserError | None:
    """Why a trial could not be what the study's others are, which is no result of its settings; None where it could."""
    outcome = event.outcome
    for rule in (EDITED, OTHER_DATA):
        if isinstance(outcome, RunFailed) and rule in outcome.detail:
            got = outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # by its worker's own error
            fix = "undo that, then --resume; or go on with it by --resume --accept-changes"
            return UserError(rule, f"trial {event.job}: {got or outcome.detail}", fix)
    return None


def refuse_full_disk(event: JobEvent) -> None:
    """Raise ``UserError`` where a trial failed because its machine's disk is full: no fault of its own."""
    outcome = event.outcome
    if isinstance(outcome, RunFailed) and UNWRITABLE in outcome.detail:
        got = outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # by its worker's own error
        raise UserError(UNWRITABLE, f"trial {event.job}: {got or outcome.detail}", "free space, then --resume")
