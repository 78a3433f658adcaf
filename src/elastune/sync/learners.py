"""Several learners on one worker: each is model and optimizer as they stand there, put into the one model in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastune.mechanisms.base import Replica
from elastune.sync.moments import StateEntry, completed, entries_of, numbers_of, united

Values = Sequence[torch.Tensor]


@dataclass
class _Learner:
    """One learner's tensors. ``moments``: the optimizer's state of each parameter, in the parameters' order."""

    values: list[torch.Tensor]
    buffers: list[torch.Tensor]
    moments: list[dict[str, Any]]

    def copied(self) -> _Learner:
        return _Learner(
            [value.clone() for value in self.values],
            [buffer.clone() for buffer in self.buffers],
            copy.deepcopy(self.moments),
        )


class Learners:
    """The learners of one worker over a round: all begin as the model stands then, and end as one.

    The program has one model and one optimizer; whose values they have is changed by exchanging the memory of their
    tensors, which costs nothing. ``keeps_moments``: the optimizer's state outlives a round, as its mean.
    """

    def __init__(self, replica: Replica, *, keeps_moments: bool = True) -> None:
        self._replica = replica
        self._keeps_moments = keeps_moments
        self._buffers = list(replica.module.buffers())
        self._origin: _Learner | None = None
        self._held: dict[int, _Learner] = {}
        self._options: list[dict[str, Any]] = []
        self._current: int | None = None

    def begin_round(self) -> list[torch.Tensor]:
        """A round begins here: ``restore`` comes back to this place. Returns its parameters, not to be changed."""
        self._held, self._current = {}, None
        self._origin = self._live().copied()
        groups = self._replica.optimizer.param_groups
        options = ({name: value for name, value in group.items() if name != "params"} for group in groups)
        self._options = [copy.deepcopy(own) for own in options]  # a learning rate may be a tensor, changed in place
        return self._origin.values

    @property
    def buffers(self) -> int:
        """How many of a learner's numbers (``states``) are buffers."""
        return sum(buffer.is_floating_point() for buffer in self._buffers)

    def begun_numbers(self, entries: Sequence[StateEntry]) -> list[torch.Tensor]:
        """What each number that ``states`` tells was when the round began, not to be changed: zero, of those of
        ``entries`` that the optimizer did not have."""
        assert self._origin is not None
        params = self._replica.params
        moments = numbers_of(completed(self._origin.moments, entries, params)) if self._keeps_moments else []
        return [*self._origin.values, *(b for b in self._origin.buffers if b.is_floating_point()), *moments]

    @property
    def begun(self) -> list[torch.Tensor]:
        """The parameters that the round began with, not to be changed."""
        assert self._origin is not None
        return self._origin.values

    def enter(self, learner: int) -> None:
        """From here on the model is ``learner``'s."""
        if learner == self._current:
            return
        self._put_away()
        self._current = learner
        if learner in self._held:
            self._install(self._held.pop(learner))
        elif self._held:
            assert self._origin is not None
            self._install(self._origin.copied())

    def values(self, carried: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """Each learner's parameters, between two of its steps; they may be changed in place."""
        self._put_away()
        return {learner: self._held[learner].values for learner in carried}

    def entries(self, carried: Sequence[int]) -> list[StateEntry]:
        """What the optimizer has of any of these learners. Raises ``UserError`` where it keeps what has no mean."""
        self._put_away()
        return united(entries_of(self._held[learner].moments, self._replica.params) for learner in carried)

    def complete(self, carried: Sequence[int], entries: Sequence[StateEntry]) -> None:
        """Let each of these learners have all of ``entries``: zeros where its optimizer has nothing yet."""
        self._put_away()
        for learner in carried:
            held = self._held[learner]
            held.moments = completed(held.moments, entries, self._replica.params)

    def states(self, carried: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each learner's floating-point numbers at the end of its round, in one order, single numbers as tensors."""
        self._put_away()
        for learner in carried:
            held = self._held[learner]
            buffers = [buffer for buffer in held.buffers if buffer.is_floating_point()]
            moments = numbers_of(held.moments) if self._keeps_moments else []
            yield learner, [*held.values, *buffers, *moments]

    def settle(self, means: Sequence[torch.Tensor], end: Callable[[Values, Values], Values]) -> None:
        """All learners are one again: ``means`` has the mean of each number that ``states`` told.

        ``end``: what parameters become, of what they were when the round began and their means. What has no mean (a
        model's counters) is the first learner's of this worker: it moves alike for all.
        """
        self._put_away()
        numel = len(self._replica.params)
        values = end(self.begun, means[:numel])
        self._install(self._held[min(self._held)])
        if not self._keeps_moments:
            for p in self._replica.params:
                self._replica.optimizer.state.pop(p, None)
        left = iter([*values, *means[numel:]])
        live = self._live()
        for target in (*live.values, *(buffer for buffer in live.buffers if buffer.is_floating_point())):
            target.copy_(next(left))
        for state in (self._replica.optimizer.state[p] for p in self._replica.params if self._moments(p)):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(next(left))
                elif value is not None:
                    state[name] = type(value)(next(left).item())
        self._held, self._current, self._origin = {}, None, None

    def restore(self) -> None:
        """As all was when the round began."""
        if self._origin is None:
            return
        self._install(self._origin)
        for group, options in zip(self._replica.optimizer.param_groups, self._options, strict=True):
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)  # the program may hold it, to change it
                else:
                    group[name] = value
        self._held, self._current, self._origin = {}, None, None

    # -- whose memory is in place -------------------------------------------------------------------------------------

    def _put_away(self) -> None:
        if self._current is not None:
            self._held[self._current], self._current = self._live(), None

    def _live(self) -> _Learner:
        params = self._replica.params
        buffers = [buffer.data for buffer in self._buffers]
        return _Learner([p.data for p in params], buffers, [dict(self._moments(p)) for p in params])

    def _moments(self, p: torch.nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of ``p``; a look at it makes none."""
        found: dict[str, Any] = self._replica.optimizer.state.get(p, {})
        return found

    def _install(self, learner: _Learner) -> None:
        state = self._replica.optimizer.state
        for p, value, moments in zip(self._replica.params, learner.values, learner.moments, strict=True):
            p.data = value
            if moments:
                state[p] = moments
            else:
                state.pop(p, None)
        for buffer, value in zip(self._buffers, learner.buffers, strict=True):
            buffer.data = value
