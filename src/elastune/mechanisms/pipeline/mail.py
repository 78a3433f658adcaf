"""What the stages of one pipeline tell each other, and in which order who may wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

import torch

from elastune.comm.group import Group, GroupBroken
from elastune.comm.post import Letter, Post
from elastune.core.errors import UserError
from elastune.mechanisms.pipeline.parcel import pack, unpack

Kind = Literal["forward", "backward", "shape", "look", "seen", "dropped", "failure"]
"""``forward`` and ``backward`` go from chunk to chunk in training, ``look`` in evaluation; ``shape`` is that of the
model's output, ``seen`` the output itself; ``dropped``: a stage has given the step up; ``failure``: it cannot go on."""
_KINDS: tuple[Kind, ...] = get_args(Kind)
_CHUNKS = 1 << 16
TELLING_S = 2.0  # how long a stage that cannot go on waits for the others to hear it


class StageFailed(RuntimeError):
    """Another stage could not go on, and said why."""


class Mail:
    """This worker's messages in the pipeline ``group``, of which it is stage ``rank`` of ``size``.

    Messages are of a round: a step, or an evaluated batch. All stages go through the same ones, so what comes from a
    round that is over here belongs to one that was dropped.

    ``described``: calls of the model whose output the last stage has described to the others.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self.described: set[str] = set()
        self._post = Post(group)
        self._device = device
        self._came: dict[tuple[Kind, int, int, int], Letter] = {}
        self._steps = self._looks = self._dropped = 0

    def begin_step(self) -> None:
        """The next step begins."""
        self._steps += 1
        self._drop_old()

    def begin_look(self) -> None:
        """The next evaluated batch begins."""
        self._looks += 1
        self._drop_old()

    def give(self, kind: Kind, chunk: int, batch: int, value: Any) -> None:
        """Send ``value`` to the worker of ``chunk``; see ``parcel.pack``."""
        text, payload = pack(value)
        self._send(chunk % self.size, kind, chunk, batch, text, payload)

    def tell_all(self, kind: Kind, batch: int, text: str, payload: torch.Tensor | None = None) -> None:
        """Send the same to every other worker."""
        for to in range(self.size):
            if to != self.rank:
                self._send(to, kind, 0, batch, text, torch.empty(0, dtype=torch.uint8) if payload is None else payload)

    def has(self, kind: Kind, chunk: int, batch: int) -> bool:
        """Whether it has come."""
        while (came := self._post.next(wait=False)) is not None:
            self._sort(came[1])
        return (kind, self._round(kind), chunk, batch) in self._came

    def wait(self) -> None:
        """Until another message has come. Raises ``GroupBroken`` where this step was given up elsewhere."""
        if 0 < self._steps <= self._dropped:
            raise GroupBroken("another stage has given the step up")
        came = self._post.next()
        assert came is not None
        self._sort(came[1])

    def take(self, kind: Kind, chunk: int, batch: int) -> Any:
        """Wait for it; unpacked."""
        message = self._await(kind, chunk, batch, lambda: False)
        return unpack(message.text, message.payload, self._device)

    def take_text(self, kind: Kind, batch: int, meanwhile: Callable[[], bool]) -> str:
        """Wait for its text. ``meanwhile`` is done again and again, as long as it finds something to do."""
        return self._await(kind, 0, batch, meanwhile).text

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """What fails inside fails on every stage: nobody waits for a stage that cannot go on."""
        try:
            yield
        except (GroupBroken, GeneratorExit):
            raise
        except UserError as error:
            self._tell_failure(error.told)
            raise
        except Exception as error:
            line = " ".join(str(error).split())[:300]
            self._tell_failure([f"stage {self.rank} of the pipeline failed: {type(error).__name__}: {line}"])
            raise

    def close(self) -> None:
        """Nothing more is sent."""
        self._post.close()

    def drop_step(self) -> None:
        """Tell the others that this worker gives the step up; they may be waiting for it."""
        with suppress(GroupBroken):  # then they know
            self.tell_all("dropped", 0, "")

    def _tell_failure(self, told: Sequence[str]) -> None:
        with suppress(GroupBroken):  # then everybody knows already
            self.tell_all("failure", 0, json.dumps(told))
            self._post.close(TELLING_S)

    def _await(self, kind: Kind, chunk: int, batch: int, meanwhile: Callable[[], bool]) -> Letter:
        key = kind, self._round(kind), chunk, batch
        while not self.has(kind, chunk, batch):
            if not meanwhile():
                self.wait()
        return self._came.pop(key)

    def _send(self, to: int, kind: Kind, chunk: int, batch: int, text: str, payload: torch.Tensor) -> None:
        number = self._round(kind), _KINDS.index(kind) * _CHUNKS + chunk, batch
        self._post.send(to, Letter(number, text, payload))

    def _sort(self, message: Letter) -> None:
        number, what, batch = message.number
        kind, chunk = _KINDS[what // _CHUNKS], what % _CHUNKS
        if kind == "failure":
            told = json.loads(message.text)
            raise UserError(*told) if len(told) > 1 else StageFailed(told[0])
        if kind == "dropped":
            self._dropped = max(self._dropped, number)
        elif number >= self._round(kind):
            self._came[kind, number, chunk, batch] = message

    def _round(self, kind: Kind) -> int:
        return self._looks if kind in ("look", "seen") else self._steps

    def _drop_old(self) -> None:
        self._came = {key: message for key, message in self._came.items() if key[1] >= self._round(key[0])}
