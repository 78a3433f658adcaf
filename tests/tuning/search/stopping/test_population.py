"""Population-based training as a schedule: who is replaced, by whose child, and what it finds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.core.errors import UserError
from elastune.core.options import parse
from elastune.train.program.space import probe
from elastune.tuning.search.objective import Objective, parse_objectives
from elastune.tuning.search.population import PopulationBasedTraining, Selection, explore, pushed
from elastune.tuning.search.schedule import ForkTrial, IntermediateResult, NewTrial, Resume

LOSS = parse_objectives(["loss:min"])
BOTH = parse_objectives(["accuracy:max", "seconds:min"])
EPOCHS = 8


def space(trial: Any) -> dict[str, Any]:
    found = {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True), "width": trial.suggest_int("width", 8, 64, step=8)}
    if trial.suggest_categorical("kind", ["plain", "momentum"]) == "momentum":
        found["momentum"] = trial.suggest_float("momentum", 0.0, 0.9)
    return found


# -- settings


def test_settings_are_read() -> None:
    assert parse("pbt", "", Selection) == Selection()
    text = "population=6, every=2,quantile=0.5,fixed=layers,width_0,resample=0,factor=1.5"
    assert parse("pbt", text, Selection) == Selection(6, 2, 0.5, 0.0, 1.5, ("layers", "width_0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("members=3", "pbt has no such option"),
        ("population", "option of pbt is written OPTION=VALUE"),
        ("population=", "option of pbt is written OPTION=VALUE"),
        ("fixed=", "option of pbt is written OPTION=VALUE"),
        ("every=1,every=2", "given once"),
        ("population=8,,every=2", "option of pbt is written OPTION=VALUE"),
        ("population=1", "population of pbt must be a whole number from 2 to 65536"),
        ("every=1.5", "every of pbt must be a whole number"),
        ("quantile=0.6", "quantile of pbt must be a number from 0.01 to 0.5"),
        ("factor=1", "factor of pbt must be"),
        ("resample=nan", "resample of pbt must be"),
    ],
)
def test_rubbish_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse("pbt", text, Selection)


def test_what_is_fixed_is_of_the_space() -> None:
    PopulationBasedTraining(LOSS, space, Selection(fixed=("width", "momentum")))
    with pytest.raises(UserError, match=r"got widht.*'kind', 'lr', 'momentum', 'width'"):
        PopulationBasedTraining(LOSS, space, Selection(fixed=("widht",)))


# -- explore


@pytest.mark.parametrize(
    ("distribution", "value", "down", "up"),
    [
        (FloatDistribution(0.0, 1.0), 0.5, 0.25, 1.0),
        (FloatDistribution(0.3, 0.6), 0.5, 0.3, 0.6),
        (FloatDistribution(1e-4, 1.0, log=True), 0.01, 0.005, 0.02),
        (FloatDistribution(0.0, 1.0, step=0.25), 0.25, 0.0, 0.5),
        (IntDistribution(1, 100), 10, 5, 20),
        (IntDistribution(1, 9), 1, 1, 2),
        (IntDistribution(0, 9), 0, 0, 1),
        (IntDistribution(8, 64, step=8), 64, 32, 64),
        (IntDistribution(8, 1024, log=True), 100, 50, 200),
        (CategoricalDistribution([32, 64, 128]), 64, 32, 128),
        (CategoricalDistribution([32, 64, 128]), 128, 64, 128),
        (CategoricalDistribution([3, 1, 2]), 1, 1, 1),
        (CategoricalDistribution([False, True]), False, False, False),
        (CategoricalDistribution(["relu", "tanh"]), "relu", "relu", "relu"),
    ],
)
def test_a_push_stays_in_the_range(distribution: Any, value: Any, down: Any, up: Any) -> None:
    assert pushed(distribution, value, 2.0, up=False) == down
    assert pushed(distribution, value, 2.0, up=True) == up


def test_changed_settings_are_of_the_space() -> None:
    rng = np.random.default_rng(0)
    parent = {"lr": 0.1, "width": 16, "kind": "plain", "gone": 3}
    drawn = {"resample": 0.5, "factor": 1.2, "rng": rng}
    children = [explore(space, parent, fixed=("width",), **drawn) for _ in range(200)]
    assert {child.params["width"] for child in children} == {16}
    assert {child.params["kind"] for child in children} == {"plain", "momentum"}
    assert all(("momentum" in child.params) == (child.params["kind"] == "momentum") for child in children)
    assert sum(child.params["lr"] in (0.1 * 1.2, 0.1 / 1.2) for child in children) == pytest.approx(100, abs=25)
    out_of_range = explore(space, {**parent, "width": 13}, resample=0.0, factor=1.2, fixed=("width",), rng=rng)
    assert out_of_range.params["width"] % 8 == 0


# -- who is replaced


def schedule(objectives: Sequence[Objective] = LOSS, **changes: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(objectives, space, replace(Selection(population=4, every=2), **changes), seed=1)


PARAMS = {"lr": 0.01, "width": 16, "kind": "plain"}


def come(pbt: PopulationBasedTraining, trial: int, epoch: int, *values: float, violation: float = 0.0) -> None:
    assert pbt.reported(IntermediateResult(trial, epoch, EPOCHS, values, violation)) == ""
    pbt.paused(trial, epoch)


def four(pbt: PopulationBasedTraining, *values: tuple[float, ...], epoch: int = 2) -> None:
    for trial in range(4):
        assert pbt.next(fresh=True) == NewTrial(2)
        pbt.started(trial, PARAMS)
    for trial, each in enumerate(values):
        come(pbt, trial, epoch, *each)


def test_the_worst_is_replaced_by_a_child_of_the_best() -> None:
    pbt = schedule(resample=0.0)
    four(pbt, (0.3,), (0.9,), (0.1,), (0.5,))
    assert pbt.next(fresh=True) == Resume(0, "not among the worst", 4)
    assert pbt.next(fresh=True) == pbt.next(fresh=True)
    pbt.resumed(0)
    child = pbt.next(fresh=True)
    assert isinstance(child, ForkTrial)
    assert (child.parent, child.epoch) == (2, 4)
    assert child.reason == "trial 1 was among the worst 1 of 4, trial 2 among the best at epoch 2"
    assert child.params["lr"] in (0.01 * 1.2, 0.01 / 1.2)
    assert pbt.next(fresh=False) == Resume(1, "not among the worst", 4), "no new trials: it is left as it is"
    pbt.started(4, child.params, parent=2)
    assert pbt.next(fresh=True) == Resume(2, "not among the worst", 4)
    pbt.resumed(2)
    pbt.resumed(3)
    assert pbt.next(fresh=False) is None, "whose place was taken never goes on"
    come(pbt, 4, 4, 0.2)
    assert pbt.next(fresh=True) == Resume(4, "not among the worst", 6), "nobody else has come so far"


@pytest.mark.parametrize(
    ("objectives", "values", "replaced", "parent"),
    [
        (LOSS, [(0.1,), (0.2,), (0.3,), (0.4,)], 3, 0),
        (LOSS, [(0.1,), (float("nan"),), (0.3,), (0.4,)], 1, 0),
        (BOTH, [(0.9, 10.0), (0.8, 20.0), (0.5, 5.0), (0.5, 30.0)], 3, {0, 2}),
        (BOTH, [(0.9, 10.0), (0.7, 7.0), (0.5, 5.0), (0.72, 7.5)], {1, 3}, {0, 2}),
    ],
)
def test_members_rank_by_front_and_crowding(
    objectives: Sequence[Objective], values: Any, replaced: Any, parent: Any
) -> None:
    pbt = schedule(objectives)
    four(pbt, *values)
    found: dict[int, ForkTrial] = {}
    for _ in range(4):
        match pbt.next(fresh=True):
            case ForkTrial() as child:
                found[len(found)] = child
                break
            case Resume(trial=trial):
                pbt.resumed(trial)
    (child,) = found.values()
    assert int(child.reason.split()[1]) in (replaced if isinstance(replaced, set) else {replaced})
    assert child.parent in (parent if isinstance(parent, set) else {parent})


def test_a_broken_constraint_ranks_last() -> None:
    pbt = schedule()
    four(pbt)
    for trial, (value, violation) in enumerate([(0.1, 5.0), (0.9, 0.0), (0.8, -1.0), (0.7, 0.0)]):
        come(pbt, trial, 2, value, violation=violation)
    child = pbt.next(fresh=True)
    assert isinstance(child, ForkTrial)
    assert (child.reason[:11], child.parent) == ("trial 0 was", 3)


def test_members_are_compared_after_as_many_passes() -> None:
    """Trial 0 is far ahead: what it had reached after two passes counts, which was the worst."""
    pbt = schedule(quantile=0.25)
    four(pbt)
    pbt.reported(IntermediateResult(0, 2, EPOCHS, (0.9,)))
    come(pbt, 0, 6, 0.1)
    for trial, loss in ((1, 0.5), (2, 0.6), (3, 0.7)):
        come(pbt, trial, 2, loss)
    for trial in (1, 2, 3):
        assert pbt.next(fresh=True) == Resume(trial, "not among the worst", 4)
        pbt.resumed(trial)


def test_too_few_decide_nothing_and_the_least_far_goes_first() -> None:
    pbt = schedule()
    four(pbt)
    come(pbt, 3, 2, 0.9)
    assert pbt.next(fresh=True) == Resume(3, "not among the worst", 4)
    come(pbt, 3, 4, 0.9)
    come(pbt, 1, 2, 0.1)
    pbt.resumed(1)
    come(pbt, 1, 3, 0.1)  # as somebody else wanted it
    assert pbt.next(fresh=True) == Resume(1, "not among the worst", 4)


def test_who_failed_is_replaced_too() -> None:
    pbt = schedule()
    four(pbt)
    pbt.ended(0, None)
    assert pbt.next(fresh=True) == NewTrial(2), "nobody has shown anything"
    assert pbt.next(fresh=False) is None
    pbt.started(4, PARAMS)
    for trial, loss in ((1, 0.3), (2, 0.2), (3, 0.4)):
        come(pbt, trial, 2, loss)
    pbt.ended(4, None)
    child = pbt.next(fresh=True)
    assert isinstance(child, ForkTrial)
    assert child.parent == 2
    assert child.reason == "trial 4 failed, trial 2 among the best at epoch 2"
    pbt.started(5, child.params, parent=2)
    assert pbt.next(fresh=True) == Resume(1, "not among the worst", 4)


def test_a_second_population_knows_nothing_of_the_first() -> None:
    pbt = schedule()
    four(pbt, (0.1,), (0.2,), (0.3,), (0.4,))
    for trial in range(4):
        pbt.ended(trial, (0.1,))
    for trial in range(4, 8):
        assert pbt.next(fresh=True) == NewTrial(2)
        pbt.started(trial, PARAMS)
        come(pbt, trial, 2, float(trial))
        if trial < 7:
            pbt.resumed(trial)
    child = pbt.next(fresh=True)
    assert isinstance(child, ForkTrial)
    assert child.parent == 4
    assert pbt.estimates() == {}


def test_what_is_not_allowed_is_not_proposed() -> None:
    def proposed(allowed: Callable[[Any], bool]) -> list[float]:
        found = []
        for seed in range(20):
            pbt = PopulationBasedTraining(LOSS, space, Selection(4, 2), seed, allowed)
            four(pbt, (0.9,), (0.1,), (0.2,), (0.3,))
            child = pbt.next(fresh=True)
            assert isinstance(child, ForkTrial)
            found.append(child.params["lr"])
        return found

    assert min(proposed(lambda sample: True)) < 0.01
    assert min(proposed(lambda sample: sample.params["lr"] >= 0.01)) >= 0.01
    assert set(proposed(lambda sample: False)) == {0.01}


# -- a landscape whose optimum moves


@dataclass
class Trained:
    """Expected loss of noisy SGD on a parabola: v <- (1 - lr)^2 v + lr^2, whose best rate is v / (v + 1): it falls."""

    lr: float
    epoch: int = 0
    losses: list[float] = field(default_factory=lambda: [1.0])

    def train(self) -> float:
        for _ in range(10):
            self.losses.append((1 - self.lr) ** 2 * self.losses[-1] + self.lr**2)
        self.epoch += 1
        return self.losses[-1]


def one(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}


@dataclass
class World:
    """The driver's part: ``workers`` trials at once, each pass takes a time of its own; every event is kept."""

    pbt: PopulationBasedTraining
    seed: int
    workers: int = 4
    events: list[tuple[str, Any]] = field(default_factory=list)

    def tell(self, kind: str, *told: Any) -> None:
        self.events.append((kind, told))
        getattr(self.pbt, kind)(*told)

    def run(self, epochs: int, population: int) -> tuple[float, int]:
        """The lowest loss, and how many passes it cost."""
        drawn = [sample.params for sample in probe(one, population, self.seed)]
        trials: dict[int, Trained] = {}
        queue: list[tuple[float, int, int]] = []
        now, cost, number, lowest = 0.0, 0, 0, float("inf")
        while True:
            while len(queue) < self.workers:
                found = self.pbt.next(fresh=True)
                match found:
                    case Resume(trial=trial):
                        self.tell("resumed", trial)
                    case ForkTrial(parent=parent, params=params):
                        trial, number = number, number + 1
                        before = trials[parent]
                        trials[trial] = Trained(params["lr"], before.epoch, list(before.losses))
                        self.tell("started", trial, dict(params), parent)
                    case NewTrial() if drawn:
                        trial, number = number, number + 1
                        trials[trial] = Trained(drawn[0]["lr"])
                        self.tell("started", trial, drawn.pop(0), None)
                    case _:
                        break
                assert isinstance(found, (Resume, ForkTrial, NewTrial))
                heapq.heappush(queue, (now + 1 + 0.1 * (trial % 3), trial, found.epoch or epochs))
            if not queue:
                return lowest, cost
            now, trial, until = heapq.heappop(queue)
            loss, cost, at = trials[trial].train(), cost + 1, trials[trial].epoch
            self.tell("reported", IntermediateResult(trial, at, epochs, (loss,)))
            if at >= epochs:
                lowest = min(lowest, loss)
                self.tell("ended", trial, (loss,))
            elif at >= until:
                self.tell("paused", trial, at)
            else:
                heapq.heappush(queue, (now + 1, trial, until))


def test_it_finds_a_schedule_where_constant_settings_cannot() -> None:
    """At equal cost it beats random search, and even the best constant rate of all."""
    epochs, population = 40, 10
    best_constant = min(_end(lr, epochs) for lr in np.geomspace(1e-4, 1.0, 400).tolist())
    ratios = []
    for seed in range(5):
        pbt = PopulationBasedTraining(LOSS, one, Selection(population, every=1), seed)
        found, cost = World(pbt, seed).run(epochs, population)
        assert cost <= epochs * population
        random = min(_end(sample.params["lr"], epochs) for sample in probe(one, population, seed + 100))
        ratios.append((found / random, found / best_constant))
    assert np.median([ratio for ratio, _ in ratios]) < 0.7, ratios
    assert np.median([ratio for _, ratio in ratios]) < 0.9, ratios


def test_members_of_equal_speed_are_all_judged() -> None:
    """The paper's toy problem (its figure 2): each of two kinds of members improves one of two weights alone.

    Who arrives first finds nobody to compare with: judged at its last pass only, a population would keep one kind.
    """

    def two(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_float(name, 0.0, 1.0) for name in ("first", "second")}

    quality = parse_objectives(["quality:max"])
    for seed in range(8):
        pbt = PopulationBasedTraining(quality, two, Selection(4, every=1), seed)
        params: dict[int, dict[str, Any]] = {}
        weights: dict[int, tuple[float, float]] = {}
        epochs = dict.fromkeys(range(4), 0)
        for trial in range(4):
            params[trial], weights[trial] = {"first": (trial + 1) % 2, "second": trial % 2}, (0.9, 0.9)
            assert pbt.next(fresh=True) == NewTrial(1)
            pbt.started(trial, params[trial])
        members = list(range(4))
        for _ in range(40):  # in the same order each time
            for trial in members:
                epochs[trial] += 1
                rates = params[trial]["first"], params[trial]["second"]
                a, b = (w * (1 - 0.04 * rate) ** 4 for w, rate in zip(weights[trial], rates, strict=True))
                weights[trial] = a, b
                come_at(pbt, trial, epochs[trial], 1.2 - a**2 - b**2)
                match pbt.next(fresh=True):
                    case Resume(trial=same):
                        assert same == trial
                        pbt.resumed(trial)
                    case ForkTrial(parent=parent, params=changed):
                        child = len(params)
                        params[child], weights[child], epochs[child] = dict(changed), weights[parent], epochs[parent]
                        pbt.started(child, changed, parent=parent)
                        members[members.index(trial)] = child
        assert max(1.2 - a**2 - b**2 for a, b in weights.values()) > 1.15, seed
        assert 20 < len(params) - 4 < 80, "of 160 turns, about the quarter that the quantile names"


def come_at(pbt: PopulationBasedTraining, trial: int, epoch: int, quality: float) -> None:
    assert pbt.reported(IntermediateResult(trial, epoch, 1000, (quality,), 0.0)) == ""
    pbt.paused(trial, epoch)


def _end(lr: float, epochs: int) -> float:
    trained = Trained(lr)
    return [trained.train() for _ in range(epochs)][-1]


def test_told_the_same_again_it_says_the_same() -> None:
    """As when a study resumes from its journal, where nobody asks."""
    selection = Selection(6, every=2, quantile=0.4)
    world = World(PopulationBasedTraining(LOSS, one, selection, 3), 3)
    world.run(12, 6)
    assert sum(kind == "started" for kind, _ in world.events) > 8
    again = PopulationBasedTraining(LOSS, one, selection, 3)
    asked = PopulationBasedTraining(LOSS, one, selection, 3)
    for kind, told in world.events:
        asked.next(fresh=True)
        getattr(again, kind)(*told)
        getattr(asked, kind)(*told)
        assert again.next(fresh=True) == asked.next(fresh=True)
        assert again.next(fresh=False) == asked.next(fresh=False)
