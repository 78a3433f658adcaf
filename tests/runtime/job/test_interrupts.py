"""Which signal asked a command to end: a batch system gives the command again, a person does not."""

from __future__ import annotations

import os
import signal

import pytest

from elastune.cli.output import stopped_code
from elastune.runtime.job import interrupts as interrupts_module
from elastune.runtime.job.interrupts import HandOver, Interrupts, terminated


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM], 75),
        ([signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGINT], 75),
        ([signal.SIGINT, signal.SIGTERM], 130),
        ([signal.SIGUSR1], 130),  # a notice, which has its own end
        ([], 130),
    ],
)
def test_the_first_signal_decides_the_exit_code(
    signals: list[signal.Signals], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts_module, "_ended_by", [])  # other tests find what they had
    with Interrupts() as interrupts:
        for number in signals:
            os.kill(os.getpid(), number)
    assert interrupts.count == sum(number != signal.SIGUSR1 for number in signals)
    assert terminated() == (code == 75)
    assert stopped_code() == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_process_that_is_begun_again_ends_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(interrupts_module, "_ended_by", [])
    monkeypatch.setattr(interrupts_module.os, "_exit", ended.append)
    try:
        for follows in (True, False):
            HandOver.ask(lambda follows=follows: follows)
            with Interrupts():
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), signal.SIGINT)  # a person ends the run, whatever Slurm does
    finally:
        HandOver.ask(None)
    assert ended == [75]
