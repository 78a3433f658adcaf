"""Workers that are lost where a loss is computed, in scripts whose lines know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import elastune
from elastune.testing.faults import inject


def losing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, of which each call is the place ``loss`` of the current run's faults."""
    session, reaches = elastune.current_session(), []

    def reached(*given: Any, **options: Any) -> Any:
        if not reaches:  # now: the models are prepared
            reaches.append(inject(session))
        reaches[0]("loss")
        return function(*given, **options)

    return reached
