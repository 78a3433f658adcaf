"""How fast a program goes on that tests run: slowly while it waits for what was asked for, and else as fast as it can.

A worker that joins needs a time that nobody knows on a busy machine, and training must not be over by then. So a
program rests after each step for as long as something is awaited, longer and longer where its last step comes near.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from elastune.core.mesh import Mesh
from elastune.train.session import Session

BASE_S = 0.06
LAST_STEPS = 16
LONGEST_S = 2.0


def rest_s(step: int, asked_at: int, deadline: int, base_s: float) -> float:
    """Seconds to rest after ``step`` for what was asked for at step ``asked_at`` and must have come by ``deadline``.

    ``base_s``, but in the ``LAST_STEPS``, or the second half of fewer, four times as long after each step as after the
    one before, up to ``LONGEST_S``.
    """
    late = step - (deadline - min(LAST_STEPS, (deadline - asked_at) // 2))
    return base_s if late <= 0 else min(base_s * 4.0 ** min(late, 10), max(LONGEST_S, base_s))


def parse_wishes(texts: list[str]) -> dict[int, str]:
    """Of "3 4": at step 3, four workers; of "3 data=2,shard=2": at step 3, that mesh."""
    found = (text.split() for text in texts)
    return {int(step): wish for step, wish in found}


class Rests:
    """Rests of ``session``'s program of ``steps`` steps, as its config says.

    ``pause_s``: after every step. With ``wishes`` (by step) only while workers are not as many, or do not stand, as the
    last of them wants. With ``until``, a path, only until that file exists.
    """

    def __init__(self, session: Session, steps: int, wishes: Mapping[int, str] | None = None) -> None:
        self._session, self._steps, self._wishes = session, steps, dict(wishes or {})
        self._pause_s = float(str(session.config["pause_s"]))
        self._until = str(session.config.get("until") or "")

    def rest(self) -> None:
        """After a step."""
        time.sleep(self._seconds(self._session.step))

    def _seconds(self, step: int) -> float:
        base_s = self._pause_s or BASE_S
        if self._until:
            return 0.0 if os.path.exists(self._until) else rest_s(step, 0, self._steps, base_s)
        if not self._wishes:
            return self._pause_s
        asked_at = max((at for at in self._wishes if at <= step), default=None)
        if asked_at is None or self._stands(self._wishes[asked_at]):
            return 0.0
        return rest_s(step, asked_at, min((at for at in self._wishes if at > step), default=self._steps), base_s)

    def _stands(self, wish: str) -> bool:
        """Whether it came true."""
        mesh = self._session.state.workers.comms.mesh
        return mesh.workers == int(wish) if wish.isdecimal() else mesh == Mesh.parse(wish)
