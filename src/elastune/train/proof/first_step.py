"""The proof in a run's first step: is the loss a mean over samples, and has it the same gradient on all workers?

It takes three passes over a few samples, in a fork of each worker that ends with them, so that nothing of them shows in
the run. A pass over two halves of the samples and over both together tells a sum from a mean. All workers take the same
samples, so their gradients must agree. Processors of other kinds round otherwise, so norms are compared, not bits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.train.data.fingerprint import checksum_of
from elastune.train.data.source import StepPlan
from elastune.train.proof.compare import Leaf, Leaves, PassRecord, StepRecord, explain_slots
from elastune.train.proof.recorder import Quiet, casts, gradient_of, line_in, parts_of

MOST_SAMPLES = 32
LIMIT_S = 1.0
PASSES = 3
KnownLoss = Literal["mean", "unequal mean", "samples", "unknown"]
MEAN_LOSS: Final = "mean"
SUM_LOSS: Final = "sum"
UNKNOWN: Final = "unknown"
SAME_NORM = 1e-3  # relative; what depends on the worker differs by more
IN_PROOF = "ELASTUNE_PROOF"
"""This environment variable is set to 1 in the fork alone: a program may leave out there what acts elsewhere."""
UNCHECKED = "--unchecked goes on without this proof"
SUMMED = "a loss that several slots share is a mean over samples"
APART = "the same samples have the same gradient on all workers"
MISTAKES = {
    SUMMED: f"say session.backward(loss, reduction='sum'), give the mean, or use one worker and one slot; {UNCHECKED}",
    APART: f"let loss, model and seeds depend on neither session.rank nor session.size; {UNCHECKED}",
}
"""The mistakes that end a training, and what to write."""


@dataclass(frozen=True)
class FirstPasses:
    """What a worker's fork has seen.

    Attributes:
        loss: "mean", "sum", another cause of ``compare.SlotsExplained``, or "unknown".
        ratio: The gradient of all samples over the mean of the halves' gradients.
        lines: The lines that reduce to the loss.
        content: A checksum of the samples.
        norms: Of the gradient of all samples, parameter by parameter; empty: not known.
        seconds: How long it took.
    """

    loss: Literal["sum", KnownLoss] = UNKNOWN
    ratio: float = 1.0
    lines: tuple[int, ...] = ()
    content: int = 0
    norms: tuple[float, ...] = ()
    seconds: float = 0.0

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> FirstPasses:
        """What ``encode`` gave; nothing known where the data are cut short."""
        try:
            fields = json.loads(data)
            return cls(**{**fields, "lines": tuple(fields["lines"]), "norms": tuple(map(float, fields["norms"]))})
        except (ValueError, TypeError, KeyError):
            return cls()


class FirstStep:
    """The proof of one worker: forks, takes passes in the fork, and judges what all workers have seen."""

    def __init__(self, program: Path) -> None:
        self.in_fork = False
        self._program = program.resolve()
        self._pipe = -1
        self._child = 0
        self._begun_s = 0.0
        self._content = 0
        self._passes: list[PassRecord] = []
        self._numbers: Sequence[int] = ()

    @staticmethod
    def places(plan: StepPlan) -> list[range]:
        """The places of the three passes: two halves, and both; none where the batch is too small."""
        count = min(plan.size, MOST_SAMPLES) // 2
        start = plan.offset
        halves = [range(start, start + count), range(start + count, start + 2 * count)]
        return [*halves, range(start, start + 2 * count)] if count else []

    # -- in the fork ---------------------------------------------------------------------------------------------------

    def fork(self) -> bool:
        """Fork this process. Return whether this is the fork, which has ``LIMIT_S`` to live.

        Where the system has no room for a fork, nothing is proved.
        """
        self._begun_s = time.monotonic()
        read, write = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads: the fork uses nothing that they may hold
                self._child = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            return False
        if self._child:
            os.close(write)
            self._pipe = read
            return False
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        os.close(read)
        self._pipe, self.in_fork = write, True
        os.environ[IN_PROOF] = "1"
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        return True

    @contextmanager
    def passing(self, batch: Any, places: range) -> Iterator[None]:
        """Around the program's lines for ``batch``; where they raise, the fork ends."""
        self._content, self._numbers = checksum_of(batch), tuple(places)
        done = False
        try:
            with Quiet(), torch.autograd.set_detect_anomaly(True, check_nan=False):
                yield
            done = True
        finally:
            if not done:
                os._exit(1)

    def loss(self, value: torch.Tensor, module: nn.Module, *, known: bool) -> None:
        """Record the program's loss ``value``. ``known``: the program has declared that it is no mean over samples."""
        if known or len(self._passes) == PASSES:
            self.leave()
        gradient, parts = gradient_of(value, module, None), parts_of(value, str(self._program))
        losses, line = (float(value.detach()),), line_in(str(self._program))
        what = tuple(self._numbers), self._content, losses, gradient, parts, line, casts(value)
        self._passes.append(PassRecord(len(self._passes), 0, 0.5, *what))

    def leave(self) -> NoReturn:
        """End the fork without an answer."""
        os._exit(0)

    def answer(self) -> NoReturn:
        """Tell the worker what was seen, and end the fork."""
        if len(self._passes) == PASSES:
            os.write(self._pipe, _explained(self._passes, time.monotonic() - self._begun_s).encode())
        self.leave()

    # -- in the worker -------------------------------------------------------------------------------------------------

    def wait(self) -> FirstPasses:
        """What the fork has seen, within ``LIMIT_S``; nothing without a fork."""
        if self._pipe < 0:
            return FirstPasses()
        data = b""
        answer = select.poll()
        answer.register(self._pipe, select.POLLIN)
        try:
            while (left := self._begun_s + LIMIT_S - time.monotonic()) > 0:
                if not answer.poll(left * 1e3):
                    break
                more = os.read(self._pipe, 1 << 16)
                if not more:
                    break
                data += more
        finally:
            os.close(self._pipe)
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._child, 0)
        return FirstPasses.decode(data)

    def judge(self, seen: Sequence[FirstPasses]) -> KnownLoss:
        """What all workers together have ``seen``, by rank: "mean", a cause that is no certain mistake, or "unknown".

        Raises:
            UserError: The loss is a sum, or its gradient depends on the worker.
        """
        name = self._program.name
        for each in seen:
            if each.loss == SUM_LOSS:
                at = f"{name}:{','.join(map(str, each.lines))}" if each.lines else name
                value = f"{at}: twice the samples have {each.ratio:.3g} times the gradient, as a sum has"
                raise UserError(SUMMED, value, MISTAKES[SUMMED])
        known = [each for each in seen if each.norms]
        if len({each.content for each in known}) == 1 and not all(_agree(known[0], each) for each in known):
            value = f"{name}: the first {MOST_SAMPLES} samples or fewer have other gradients on other workers"
            raise UserError(APART, value, MISTAKES[APART])
        return seen[0].loss if seen[0].loss != SUM_LOSS else UNKNOWN


def _explained(passes: Sequence[PassRecord], seconds: float) -> FirstPasses:
    """What the passes over two halves and over both show."""
    *halves, both = passes
    if both.gradient is None or any(each.gradient is None for each in halves):
        return FirstPasses(content=both.content, seconds=seconds)
    cut = StepRecord(1, 0, tuple(halves), {}, _mean([each.gradient or {} for each in halves]), {})
    explained = explain_slots(StepRecord(1, 0, (both,), {}, both.gradient, {}), cut)
    loss: Literal["sum", KnownLoss] = MEAN_LOSS if explained.cause == "same" else explained.cause
    norms = tuple(leaf.norm for leaf in both.gradient.values())
    return FirstPasses(loss, explained.ratio, explained.lines, both.content, norms, seconds)


def _agree(one: FirstPasses, other: FirstPasses) -> bool:
    """Whether both have the same gradient, but for rounding."""
    largest = max(one.norms)
    return len(one.norms) == len(other.norms) and not any(  # where one is NaN, divergence is another's matter
        abs(mine - theirs) > SAME_NORM * max(mine, theirs, SAME_NORM * largest)
        for mine, theirs in zip(one.norms, other.norms, strict=True)
    )


def _mean(gradients: Sequence[Leaves]) -> dict[str, Leaf]:
    """The mean of equally weighted gradients, of the elements that were recorded."""
    names = dict.fromkeys(name for each in gradients for name in each)
    rows = {name: [each[name].values for each in gradients if name in each] for name in names}
    return {
        name: Leaf(0.0, tuple(sum(column) / len(gradients) for column in zip(*values, strict=True)), "")
        for name, values in rows.items()
    }
