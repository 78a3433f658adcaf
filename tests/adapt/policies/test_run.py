"""What a policy may see and ask for, and what it is told where that cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from elastune.adapt.policies.base import Limits, Run
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import fake_run

Ask = Callable[[Run], object]


def test_it_shows_where_training_stands() -> None:
    run = fake_run(rank=1, micro_batch=16)
    assert (run.step, run.epoch, run.samples, run.seconds) == (100, 2, 6400, 10.0)
    assert (run.rank(), run.size(), run.batch_size(), run.micro_batch(), run.lr()) == (1, 2, 64, 16, 0.1)


def test_it_shows_what_was_measured() -> None:
    signals = {"noise_scale": (400.0, 30.0), "gradient_variance": 2.0, "gradient_square": 0.5}
    times = {"step_s": 0.1, "throughput": 640.0, "loss": 1.5}
    run = fake_run({**signals, **times})
    assert (run.grad_noise_scale(), run.error("noise_scale")) == (400.0, 30.0)
    assert (run.grad_variance(), run.grad_square()) == (2.0, 0.5)
    assert (run.step_time(), run.throughput(), run.loss()) == (0.1, 640.0, 1.5)
    assert math.isnan(run.error("loss"))


def test_what_is_not_measured_yet_is_nan_and_what_never_will_be_is_an_error() -> None:
    run = fake_run({"loss": 1.0}, known=("noise_scale",))
    assert math.isnan(run.grad_noise_scale())
    assert math.isnan(run.error("noise_scale"))
    assert run.loss() == 1.0, "what is there is known"
    for ask in (run.throughput, lambda: run.error("throughput")):
        with pytest.raises(UserError, match=r"got throughput.*signals of this run: loss, noise_scale"):
            ask()
    assert math.isnan(fake_run().signal("anything"))


@pytest.mark.parametrize(
    ("ask", "decision"),
    [
        (lambda run: None, Decision()),
        (lambda run: run.resize(run.size() + 1), Decision(workers=3)),
        (lambda run: run.resize(np.int64(3)), Decision(workers=3)),
        (lambda run: run.resize(2), Decision()),
        (lambda run: run.resize(9), Decision(workers=8)),
        (lambda run: (run.resize(3), run.resize(2)), Decision()),
        (lambda run: run.replace(1), Decision(replace_rank=1)),
        (lambda run: run.set_batch_size(128), Decision(batch_size=128)),
        (lambda run: run.set_batch_size(64, "linear", 5, True), Decision()),
        (lambda run: run.set_batch_size(128, "linear"), Decision(batch_size=128, lr_factor=2.0)),
        (
            lambda run: run.set_batch_size(256, "sqrt", 10, correct_momentum=True),
            Decision(batch_size=256, lr_factor=2.0, ramp_steps=10, correct_momentum=True),
        ),
        (
            lambda run: (run.set_batch_size(128, "linear"), run.set_batch_size(256, "linear"))[0],
            Decision(batch_size=256, lr_factor=4.0),
        ),
        (lambda run: (run.set_batch_size(128, "linear"), run.set_batch_size(64)), Decision()),
        (lambda run: (run.scale_lr(0.5), run.set_batch_size(256, "linear")), Decision(batch_size=256, lr_factor=2.0)),
        (lambda run: run.set_micro_batch(16), Decision(micro_batch=16)),
        (lambda run: run.set_micro_batch(8), Decision()),
        (lambda run: run.set_lr(0.0), Decision(lr=0.0)),
        (lambda run: (run.scale_lr(2.0), run.set_lr(0.3)), Decision(lr=0.3)),
        (lambda run: (run.set_lr(0.3), run.scale_lr(2.0)), Decision(lr=0.3, lr_factor=2.0)),
        (lambda run: run.scale_lr(1.0, 5, True), Decision()),
        (lambda run: (run.scale_lr(0.5, 5), run.scale_lr(0.5)), Decision(lr_factor=0.25, ramp_steps=5)),
        (lambda run: run.scale_lr(0.5, correct_momentum=True), Decision(lr_factor=0.5, correct_momentum=True)),
        (lambda run: (run.remember(), run.stop()), Decision(remember=True, stop=True)),
        (lambda run: (run.restore(), run.scale_lr(0.5)), Decision(restore=True, lr_factor=0.5)),
    ],
)
def test_what_is_asked_for(ask: Ask, decision: Decision) -> None:
    run = fake_run(micro_batch=8)
    ask(run)
    assert run.decision == decision


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run: run.resize(0), "whole number from 1 to"),
        (lambda run: run.resize(2.5), "whole number"),
        (lambda run: run.resize(math.nan), "whole number"),
        (lambda run: run.resize(True), "whole number"),
        (lambda run: run.resize("3"), "whole number"),
        (lambda run: run.replace(2), "ranks 0 to 1"),
        (lambda run: run.replace(-1), "whole number from 0 to"),
        (lambda run: run.set_batch_size(0), "whole number from 1 to"),
        (lambda run: run.set_batch_size(128.0), "whole number"),
        (lambda run: run.set_batch_size(10_001), "an epoch of 10000 samples"),
        (lambda run: run.set_batch_size(128, "cubic"), "unknown learning-rate rule"),
        (lambda run: run.set_batch_size(128, ramp_steps=-1), "ramp_steps must be a whole number"),
        (lambda run: run.set_micro_batch(0), "whole number from 1 to"),
        (lambda run: run.set_lr(-0.1), "finite number, at least 0"),
        (lambda run: run.set_lr(math.nan), "finite number"),
        (lambda run: run.set_lr(math.inf), "finite number"),
        (lambda run: run.set_lr("0.1"), "a number or a flat list"),
        (lambda run: run.set_lr([0.1]), "finite number"),
        (lambda run: run.set_lr(None), "a number or a flat list"),
        (lambda run: run.scale_lr(0.0), "must be positive"),
        (lambda run: run.scale_lr(-1.0), "finite number"),
        (lambda run: run.scale_lr(1e300) or run.scale_lr(1e300), "finite number"),
        (lambda run: run.scale_lr(2.0, ramp_steps=0.5), "ramp_steps must be a whole number"),
        (lambda run: run.allreduce("x"), "a number or a flat list"),
        (lambda run: run.allreduce([[1.0]]), "a number or a flat list"),
        (lambda run: run.allreduce({"a": 1.0}), "a number or a flat list"),
        (lambda run: run.allreduce(1.0, "mean"), "unknown reduction"),
        (lambda run: run.allreduce(1.0, name=""), "a collective's name"),
        (lambda run: run.broadcast(1.0, root=2), "ranks 0 to 1"),
    ],
)
def test_what_cannot_be_asked_for(ask: Ask, words: str) -> None:
    run = fake_run()
    with pytest.raises(UserError, match=words):
        ask(run)


def test_workers_that_cannot_change() -> None:
    run = fake_run(limits=Limits(2, 2))
    run.resize(2)
    assert run.refused.empty
    run.resize(3)
    assert run.refused == Decision(workers=3)
    assert run.note == "asked for 3 workers; this run has 2 throughout: start it with --workers LOW:HIGH"
    run.replace(0)
    assert run.refused == Decision(replace_rank=0)
    assert run.note.startswith("asked for another worker for rank 0; this run has 2 throughout")
    assert run.decision.empty


def test_to_stay_is_no_change_even_outside_of_the_limits() -> None:
    run = fake_run(limits=Limits(3, 4, longest_batch=10))
    run.resize(2)
    run.set_batch_size(64)
    assert run.decision.empty


def test_workers_beyond_what_there_may_be_are_cut_and_noted() -> None:
    run = fake_run(limits=Limits(2, 4))
    run.resize(9)
    assert run.decision == Decision(workers=4)
    assert run.note == "asked for 9 workers; this run may have from 2 to 4: start it with other --workers LOW:HIGH"
    full = fake_run(workers=4, limits=Limits(2, 4))
    full.resize(5)
    assert full.decision.empty
    assert (full.refused, run.refused) == (Decision(workers=5), Decision())
    assert full.note == "asked for 5 workers; this run may have from 2 to 4: start it with other --workers LOW:HIGH"


def test_after_training_nothing_can_be_changed() -> None:
    run = fake_run(limits=Limits(1, 8, ended=True))
    assert run.allreduce(1.0) == 1.0
    for ask in (run.stop, lambda: run.resize(3), lambda: run.scale_lr(0.5)):
        with pytest.raises(UserError, match="after training nothing can be changed"):
            ask()


def test_a_run_that_was_kept_is_of_no_use() -> None:
    run = fake_run()
    run.close()
    for ask in (run.stop, lambda: run.allreduce(1.0), lambda: run.set_lr(0.1)):
        with pytest.raises(UserError, match="inside its hook only"):
            ask()


def test_collectives_take_numbers_and_flat_lists() -> None:
    run = fake_run(workers=3)
    assert run.allreduce(2) == 2.0
    assert run.allreduce([1.0, True], "sum") == [3.0, 3.0]
    assert run.allreduce(np.array([1.0, 2.0]), "max") == [1.0, 2.0]
    assert run.allreduce(np.float32(0.5), "min") == 0.5
    assert run.broadcast((1, 2), root=2) == [1.0, 2.0]
    assert run.allgather(1.0) == [1.0] * 3
    assert run.allgather_async([]).result() == [[]] * 3
