"""The passes of a program that does not know of sessions: which are still to be done, and which were done before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from elastune.train.program.current import at_end, end_program
from elastune.train.rng import streams_kept
from elastune.train.session import Session


class Passes:
    """The training passes of a program with a loop over epochs of its own; each is an epoch of ``session``.

    A program that starts again in mid-run (in a resumed run, or on a worker that joined) runs its loop from the start.
    The passes that are done by then give no batches, and what the program does after them has no effect.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun = 0
        self._trains = False
        self._epochs: Iterator[int] = iter(())
        at_end(self._end)

    @property
    def again(self) -> bool:
        """Whether the program repeats what was done before it started again."""
        return not self._trains and self._session.epoch > 0

    def train(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield this worker's batches of the next training pass."""
        self._begun += 1
        if not self._trains and self._begun <= self._session.epoch:
            return
        epoch = next(self._epochs, None)
        if epoch is None:  # how many there will be nobody knows but the program
            self._epochs = self._session.epochs(self._begun)
            epoch = next(self._epochs, None)
        if self._begun <= self._session.epoch:  # this worker has just joined others, who are further
            self._epochs = self._epochs if epoch is None else chain([epoch], self._epochs)
            return
        if epoch is None:
            end_program()
        self._trains = True
        yield from self._session.batches(loader)

    def _end(self) -> None:
        """Of the newest epoch: its checkpoint, its wish to stop."""
        next(self._epochs, None)


class Scheduler:
    """A scheduler that does not step while the script repeats earlier passes."""

    def __init__(self, passes: Passes, scheduler: Any) -> None:
        self._passes = passes
        self._scheduler = scheduler

    def step(self, *given: Any, **options: Any) -> None:
        if not self._passes.again:
            self._scheduler.step(*given, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def first_batch(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield one batch in place of an evaluation that was done before; random streams stay as they were."""
    with streams_kept():
        batches = list(islice(loader, 1))
    yield from batches
