"""The training set of a run, compared with what the run, or its study, was trained on before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from elastune.core.errors import UserError
from elastune.journal.records import DataContext
from elastune.train.data.fingerprint import data_context

OTHER_DATA = "training goes on with the data that it was begun with"
MOST_LOOKS = 3  # at the data sets of passes: a program whose passes differ is known by then


class SeenData:
    """What is known of a run's training sets.

    ``expected``: what a study's trials were trained on; None: not known. ``accepts``: other data are told, not refused.
    ``tell`` is called with a text for each difference that was accepted. Data sets are looked at before the first step
    of a run that goes on, and where a checkpoint is written, by whoever writes it.
    """

    def __init__(self, expected: dict[str, Any] | None, *, accepts: bool, tell: Callable[[str], None]) -> None:
        self._expected = [] if expected is None else [DataContext(**expected)]
        self._accepts = accepts
        self._tell = tell
        self._newest: Any = None
        self._looked: tuple[Any, int] | None = None  # at which data set, in which epoch
        self._contexts: list[DataContext] = []  # those that differ from each other
        self._looks = 0

    def load(self, kept: object) -> None:
        """Go on from a checkpoint that has ``kept`` this of the run's data; None: nothing."""
        if isinstance(kept, list):
            self._expected = [DataContext(**each) for each in kept]

    def begin_pass(self, dataset: Any, epoch: int) -> None:
        """A training pass over ``dataset`` begins.

        Raises:
            UserError: Where these are other data than before.
        """
        self._newest = dataset
        if not self._expected:
            return
        now = self._look(epoch)
        # Where passes differed from each other, they may again.
        told = difference(self._expected[0], now) if len(self._expected) == 1 else ""
        self._expected = []
        if told and not self._accepts:
            raise UserError(OTHER_DATA, told, "restore them, or add --accept-changes to go on with these")
        if told:
            self._tell(told)

    def kept(self, epoch: int) -> list[dict[str, Any]]:
        """What a checkpoint keeps of them, in JSON's types."""
        if self._newest is not None:
            self._look(epoch)
        return [asdict(each) for each in self._contexts]

    def context(self) -> DataContext:
        """The newest one, for the record of a run's end."""
        if self._newest is None:
            return DataContext()
        if self._looked is None or self._looked[0] is not self._newest:
            return data_context(self._newest)
        return self._contexts[-1]

    def _look(self, epoch: int) -> DataContext:
        known = self._looked is not None and self._looked[0] is self._newest and self._looked[1] == epoch
        if self._contexts and (known or self._looks >= MOST_LOOKS):
            return self._contexts[-1]
        self._looks += 1
        found = data_context(self._newest)
        self._looked = self._newest, epoch
        if found not in self._contexts:
            self._contexts.append(found)
        return found


def difference(before: DataContext, now: DataContext) -> str:
    """Return in what two training sets differ, in words; "" where they do not, or nobody knows."""
    if before.samples and now.samples and before.samples != now.samples:
        return f"data: {now.samples:,} samples, had {before.samples:,}"
    if before.sample and now.sample and before.sample != now.sample:
        return f"data: a sample is {now.sample}, was {before.sample}"
    if before.digest and now.digest and before.digest != now.digest:
        return "data: other values in the samples that were compared"
    return ""
