"""Which source suits a task: LogME as the paper writes it, and the ranking of kept trials by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elastune
from elastune.core.errors import UserError
from elastune.core.run import Program, StartFrom
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.reuse.kept_models import library
from elastune.tuning.reuse.transfer import logme, targets_of
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

ASSETS = Path(__file__).parents[2] / "programs" / "assets.py"


def evidence(features: np.ndarray, y: np.ndarray, alpha: float, beta: float) -> float:
    """log p(y | F, alpha, beta) / n as the marginal of a Gaussian: y ~ N(0, I / beta + F F' / alpha)."""
    n = len(y)
    covariance = np.eye(n) / beta + features @ features.T / alpha
    _, log_det = np.linalg.slogdet(covariance)
    return float(-(n * np.log(2 * np.pi) + log_det + y @ np.linalg.solve(covariance, y)) / 2 / n)


def best_evidence(features: np.ndarray, y: np.ndarray) -> float:
    """By looking everywhere: a grid of alpha and beta, finer around the best three times."""
    centre, reach, best = (0.0, 0.0), 8.0, -np.inf
    for _ in range(5):
        grid = [(a, b) for a in np.linspace(-reach, reach, 17) for b in np.linspace(-reach, reach, 17)]
        results = {(centre[0] + a, centre[1] + b): 0.0 for a, b in grid}
        results = {at: evidence(features, y, float(np.exp(at[0])), float(np.exp(at[1]))) for at in results}
        centre = max(results, key=lambda at: results[at])
        best, reach = max(best, results[centre]), reach / 6
    return best


@pytest.mark.parametrize(("n", "d"), [(40, 3), (12, 20)])
def test_it_is_the_largest_evidence(n: int, d: int) -> None:
    random = np.random.default_rng(n)
    features = random.normal(size=(n, d))
    y = features @ random.normal(size=d) * 0.5 + random.normal(size=n)
    assert logme(features, y[:, None]) == pytest.approx(best_evidence(features, y), abs=2e-4)


def maximised(features: np.ndarray, y: np.ndarray) -> float:
    """Algorithm 1 of the paper, word for word, with whole matrices and inverses."""
    n, d = features.shape
    alpha = beta = 1.0
    for _ in range(5000):
        a = alpha * np.eye(d) + beta * features.T @ features
        m = beta * np.linalg.inv(a) @ features.T @ y
        gamma = d - alpha * np.trace(np.linalg.inv(a))
        before, alpha, beta = alpha, gamma / (m @ m), (n - gamma) / ((features @ m - y) ** 2).sum()
        if abs(alpha - before) < 1e-10 * alpha:
            break
    a = alpha * np.eye(d) + beta * features.T @ features
    m = beta * np.linalg.inv(a) @ features.T @ y
    fit = beta / 2 * ((features @ m - y) ** 2).sum() + alpha / 2 * m @ m
    result = n / 2 * np.log(beta) + d / 2 * np.log(alpha) - n / 2 * np.log(2 * np.pi) - fit
    return float((result - np.linalg.slogdet(a)[1] / 2) / n)


@pytest.mark.parametrize(("n", "d", "seed"), [(60, 5, 0), (60, 5, 1), (200, 32, 2), (30, 24, 3)])
def test_of_classes_it_is_the_evidence_that_the_papers_algorithm_finds(n: int, d: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    right = random.integers(3, size=n)
    features = random.normal(size=(3, d))[right] + random.normal(size=(n, d)) * 2
    wanted = np.mean([maximised(features, (right == one).astype(float)) for one in range(3)])
    assert logme(features, targets_of(right)) == pytest.approx(wanted, abs=1e-4)


def test_it_is_the_mean_over_targets() -> None:
    random = np.random.default_rng(0)
    features, y = random.normal(size=(30, 4)), random.normal(size=(30, 2))
    assert logme(features, y) == pytest.approx((logme(features, y[:, :1]) + logme(features, y[:, 1:])) / 2)


def test_features_that_tell_the_classes_apart_score_higher() -> None:
    random = np.random.default_rng(1)
    right = random.integers(3, size=200)
    scores = [
        logme(
            strength * np.eye(3)[right] @ random.normal(size=(3, 8)) + random.normal(size=(200, 8)), targets_of(right)
        )
        for strength in (0.0, 0.5, 1.0, 2.0)
    ]
    assert scores == sorted(scores)


def test_nothing_to_tell_and_everything_told_are_numbers() -> None:
    features = np.zeros((6, 2))
    assert np.isfinite(logme(features, targets_of(np.array([0, 1, 0, 1, 0, 1]))))
    assert np.isfinite(logme(np.eye(6), np.eye(6)))
    assert targets_of(np.array([5, 7, 5])).tolist() == [[1, 0], [0, 1], [1, 0]]


FEATURES = """

def predict(model, name):
    x, y = points(80, 7).tensors
    hidden = model[:-1](x)
    return hidden, y % 2
"""


@pytest.fixture
def study(kept_study: Path, tmp_path: Path) -> Path:
    """A copy whose trials have told features of another task."""
    out, program = Path(shutil.copytree(kept_study, tmp_path / "study")), tmp_path / "features.py"
    program.write_text(ASSETS.read_text() + FEATURES)
    elastune.predict(out, ["newtask"], program=program)
    return out


def test_sources_are_ranked_by_their_features(study: Path, tmp_path: Path, command_here: Callable[..., Any]) -> None:
    result = command_here("transfer", study, "--data", "newtask", "--json").json
    assert (result["rows"], result["tau"], len(result["sources"])) == (80, None, 6)
    scores = [one["score"] for one in result["sources"]]
    assert scores == sorted(scores, reverse=True)
    first = result["sources"][0]
    told_by = {one.trial: one.predictions("newtask") for one in library(study).candidates}[first["trial"]]
    assert first["score"] == logme(told_by["outputs"].double().numpy(), targets_of(told_by["targets"].numpy()))
    assert first["width"] == 8
    said = command_here("transfer", study, "--data", "newtask").out
    assert f"--start-from {first['start_from']}" in said.replace("\n", " ").replace("  ", " ")


def test_estimates_are_held_against_what_was_measured(
    study: Path, tmp_path: Path, cluster: LocalCluster, command_here: Callable[..., Any]
) -> None:
    ranked = elastune.rank_sources([study], "newtask").sources
    begun = []
    for source in (ranked[0], ranked[-1]):
        out = tmp_path / f"from-{source.trial}"
        begins = StartFrom(Path(source.start_from))
        config = {"epochs": 1}
        tune(StudyRequest(Program(ASSETS), out, trials=1, workers=1, config=config, start_from=begins), cluster=cluster)
        begun.append(out)
    result = elastune.rank_sources([study], "newtask", measured=begun)
    reached = [elastune.Study.load(out).complete[0].values["accuracy"] for out in begun]
    values = dict(zip((ranked[0].trial, ranked[-1].trial), reached, strict=True))
    assert {s.trial: s.measured for s in result.sources if s.measured is not None} == values
    better = values[ranked[0].trial] - values[ranked[-1].trial]
    assert result.tau == (None if better == 0 else float(np.sign(better)))
    output = command_here("transfer", study, "--data", "newtask", "--measured", begun[0], "--measured", begun[1])
    assert "Kendall's tau" in output.out


def tau_b(one: list[float], other: list[float]) -> float:
    """Kendall's, by definition: pairs in the same order, less those in the opposite one, over pairs without ties."""
    pairs = [(np.sign(a - b), np.sign(c - d)) for (a, c), (b, d) in combinations(zip(one, other, strict=True), 2)]
    untied = [sum(x != 0 for x, _ in pairs), sum(y != 0 for _, y in pairs)]
    return float(sum(x * y for x, y in pairs) / np.sqrt(untied[0] * untied[1]))


def test_six_sources_are_held_against_what_all_of_them_have_reached(
    study: Path, tmp_path: Path, cluster: LocalCluster
) -> None:
    ranked, begun, reached = elastune.rank_sources([study], "newtask").sources, [], {}
    for source in ranked:
        out, begins = tmp_path / f"from-{source.trial}", StartFrom(Path(source.start_from))
        request = StudyRequest(
            Program(ASSETS), out, trials=1, workers=1, config={"epochs": 1, "lr": 0.01}, start_from=begins
        )
        tune(
            request, space=lambda trial: {"batch_size": trial.suggest_categorical("batch_size", [40])}, cluster=cluster
        )
        begun.append(out)
        reached[source.trial] = elastune.Study.load(out).complete[0].values["accuracy"]
    result = elastune.rank_sources([study], "newtask", measured=begun)
    assert len(result.sources) == 6
    assert {source.trial: source.measured for source in result.sources} == reached
    assert len(set(reached.values())) >= 3, "sources differ in what comes of them"
    wanted = tau_b([source.score for source in result.sources], [reached[source.trial] for source in result.sources])
    assert result.tau == pytest.approx(wanted)
    assert elastune.rank_sources([study], "newtask", measured=begun[::-1]).tau == result.tau


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "test"), "nothing is chosen by"),
        (("--data", "unknown"), "needs trials with predictions"),
        (("--data", "newtask", "--measured", "{study}"), "begun with --start-from"),
        (("--data", "../x"), "small letters"),
        ((), "--data"),
    ],
)
def test_wrong_questions_are_told_in_one_line(
    study: Path, options: tuple[str, ...], words: str, command_here: Callable[..., Any]
) -> None:
    result = command_here("transfer", study, *(text.format(study=study) for text in options))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert words in result.err


def test_sources_that_saw_other_samples_are_not_compared(study: Path, tmp_path: Path) -> None:
    other, program = Path(shutil.copytree(study, tmp_path / "other")), tmp_path / "more.py"
    program.write_text(ASSETS.read_text() + FEATURES.replace("points(80, 7)", "points(80, 8)"))
    elastune.predict(other, ["newtask"], program=program, again=True)
    with pytest.raises(UserError, match="same samples"):
        elastune.rank_sources([study, other], "newtask")
