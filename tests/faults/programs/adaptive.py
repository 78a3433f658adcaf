"""The program of ``elastic.py`` under policies, good ones and bad ones."""

from __future__ import annotations

import math

import elastic
from elastic import train  # noqa: F401
from elastune import Policy

config = {**elastic.config, "epochs": 2}


class Steered(Policy):
    """What it does hangs on every bit of what was measured."""

    monitors = ("noise_scale", "loss")

    def __init__(self) -> None:
        self.seen = 0

    def before_epoch(self, run) -> None:
        if run.epoch == 1:
            run.set_batch_size(96, lr="linear", ramp_steps=5, correct_momentum=True)

    def after_step(self, run) -> None:
        self.seen += 1
        if self.seen % 3 == 0 and math.isfinite(run.grad_noise_scale()):
            run.scale_lr(1 + 0.01 * math.sin(1e6 * run.grad_noise_scale() + 1e6 * run.loss()))
        if self.seen == 12:
            run.set_batch_size(48)


class Averaging(Policy):
    """Steers by what it averages, though that is equal already: its hooks wait for the others."""

    monitors = ("noise_scale", "loss")

    def __init__(self) -> None:
        self.seen = 0

    def after_step(self, run) -> None:
        asked = run.allreduce_async(1.0, "sum"), run.allreduce_async(run.grad_noise_scale(), "max")
        size, noise = (each.result() for each in asked)
        self.seen += 1
        if size != run.size():
            raise ValueError(f"{size} of {run.size()} workers")
        if run.step % 3 == 0 and math.isfinite(noise):
            run.scale_lr(1 + 0.01 * math.sin(1e6 * noise + self.seen))


class Remembering(Policy):
    """Goes back once, to a state four steps old."""

    def after_step(self, run) -> None:
        if run.step == 6:
            run.remember()
        if run.step == 11:
            run.restore()
            run.scale_lr(0.5)


class Talking(Policy):
    """Every kind of collective, in another order on every worker; what it learns decides."""

    def __init__(self) -> None:
        self.heard = 0

    def after_step(self, run) -> None:
        names = ["a", "b", "c"]
        turn = run.rank() % 3
        asked = {name: run.allreduce_async(1.0, "sum", name=name) for name in names[turn:] + names[:turn]}
        ranks = run.allgather(float(run.rank()))
        first = run.broadcast(run.rank() + 7.0, root=0)
        workers = {asked[name].result() for name in names}
        if workers == {float(len(ranks))} and ranks == sorted(ranks) and first == 7.0:
            self.heard += 1
        if self.heard == 3:
            run.set_lr(1e-3)
            self.heard = 100


class Divided(Policy):
    """Workers want different things."""

    def after_step(self, run) -> None:
        if run.step in (4, 9):
            run.set_batch_size(64 + run.rank())


class Failing(Policy):
    """Raises now and then, on one worker only."""

    def after_step(self, run) -> None:
        if run.step in (4, 9) and run.rank() == 0:
            run.set_batch_size(32)
            raise KeyError("no such thing")


class Greedy(Policy):
    """Asks for what cannot be."""

    def after_step(self, run) -> None:
        if run.step == 4:
            run.set_batch_size(10**7)
        if run.step == 8:
            run.set_lr(float("nan"))


class Crowding(Policy):
    """Asks for more workers than there may be, again and again."""

    def after_step(self, run) -> None:
        if run.step >= 6:
            run.resize(99)


class Growing(Policy):
    """One more worker after every few steps."""

    def after_step(self, run) -> None:
        if run.step % 8 == 0 and run.size() < 3:
            run.resize(run.size() + 1)


class Ending(Policy):
    """Talks when all is over, and before anything has begun."""

    def before_train(self, run) -> None:
        run.set_batch_size(100)

    def after_train(self, run) -> None:
        if run.allreduce(float(run.rank()), "sum") != run.size() * (run.size() - 1) / 2:
            raise ValueError("workers were not all heard")


class Curious(Policy):
    """Wants to know what nobody measures."""

    def after_step(self, run) -> None:
        if run.step == 3:
            run.signal("happiness")


class Halting(Policy):
    """Has seen enough."""

    def after_step(self, run) -> None:
        if run.step == 9:
            run.stop()


class StopEpoch(Policy):
    """Has seen enough at the end of an epoch."""

    def after_epoch(self, run) -> None:
        if run.epoch == 1:
            run.stop()


class Halving(Policy):
    """Half the rate in every epoch."""

    def before_epoch(self, run) -> None:
        run.scale_lr(0.5, ramp_steps=3)


class AskAlways(Policy):
    """Repeats itself until it gets what it wants."""

    def after_step(self, run) -> None:
        if run.step >= 10 and run.size() < 3:
            run.resize(3)


class AskOnce(Policy):
    """Asks for a third worker once."""

    def after_step(self, run) -> None:
        if run.step == 10:
            run.resize(3)


class Torn(Policy):
    """Agrees on even steps, disagrees on odd ones; a vote in each."""

    def before_step(self, run) -> None:
        run.set_lr(1e-3 + (1e-4 * run.rank() if run.step % 2 else 1e-6 * run.step))


class Timed(Policy):
    """What it does hangs on what the clock says."""

    def after_step(self, run) -> None:
        if run.step > 14 and math.isfinite(run.step_time()):
            run.set_lr(1e-3 + 1e-3 * run.step_time())


class Scheduled(Policy):
    """A change at steps 5 and 10, whatever others do."""

    def __init__(self) -> None:
        self.done = 0

    def before_step(self, run) -> None:
        if run.step >= (5, 10, 1 << 30)[self.done]:
            self.done += 1
            run.set_batch_size(run.batch_size() + 10)
