"""Predicted beside measured time of a run's or a study's steps, by the record of a cluster's plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from elastune.core.formatting import count, duration, number
from elastune.core.journal.records import Entry, PlanMade, TimesFitted, TrialFinished, TrialStarted
from elastune.core.mesh import Mesh
from elastune.core.plan.step_time import check_program, predicted_step
from elastune.core.run import ExecutionSettings
from elastune.report.overviews import RunOverview
from elastune.tuning.study.trial_results import execution_settings_of

BATCH = "batch_size"


def run_prediction(made: PlanMade, run: RunOverview) -> tuple[str, ...]:
    """One sentence about a run: its median step, predicted and measured.

    Raises:
        UserError: If the plan is for another program.
    """
    check_program(made, run.started.program)
    end = run.finished
    if end is None or end.step_s is None:
        return ("The run has no step time yet.",)
    return (_step_sentence(made, ExecutionSettings.from_json(run.started.execution), run.started.config, [end.step_s]),)


def study_prediction(made: PlanMade, program: object, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Step and training time, predicted and measured, for each group of trials with equal settings; then for all.

    Trials are in one group if they have the same execution settings and the same batch size.

    Raises:
        UserError: If the plan is for another program.
    """
    check_program(made, program)
    started: dict[int, TrialStarted] = {}
    alike: dict[tuple[str, Any], list[TrialFinished]] = defaultdict(list)
    first: dict[tuple[str, Any], TrialStarted] = {}
    for entry in entries:
        match entry.record:
            case TrialStarted() as trial_start:
                started[trial_start.trial] = trial_start
            case TrialFinished(trial=trial, run=run) if run is not None and run.step_s is not None:
                trial_start = started[trial]
                key = repr(sorted(trial_start.execution.items())), trial_start.config.get(BATCH)
                alike[key].append(entry.record)
                first.setdefault(key, trial_start)
    sentences, whole = list[str](), list[tuple[float, float]]()
    for key, ended in alike.items():
        execution, config = execution_settings_of(first[key].execution), first[key].config
        steps = [end.run.step_s for end in ended if end.run is not None and end.run.step_s is not None]
        words, took = _trainings(made, execution, config, ended)
        sentences.append(_step_sentence(made, execution, config, steps) + words)
        whole += took
    if len(sentences) > 1 and whole:
        predicted, measured = (sum(each) for each in zip(*whole, strict=True))
        of = f"All {count(len(whole), 'training')} that the model speaks of, one after another: {duration(measured)}"
        sentences.append(f"{of} measured, {duration(predicted)} (modelled): error {predicted / measured - 1:+.1%}.")
    return tuple(sentences) or ("No trial has a step time yet.",)


def fitted_prediction(times: TimesFitted | None) -> tuple[str, ...]:
    """How well a frontier's own step-time model predicted the steps that it was not fitted to."""
    if times is None:
        return ()
    return tuple(f"{what}: predicted {number(ratio, 3)} x the measured time." for what, ratio in times.errors.items())


def _trainings(
    made: PlanMade, execution: ExecutionSettings, config: Mapping[str, Any], ended: Sequence[TrialFinished]
) -> tuple[str, list[tuple[float, float]]]:
    """A sentence about whole trainings with equal settings, and the predicted and measured seconds of each.

    Both are empty if the plan does not record the time that a training takes beside its steps.
    """
    step_s = predicted_step(made, execution, _batch(made, config))
    beside_s = made.answer.get("search", {}).get("beside_s")
    if step_s is None or beside_s is None:
        return "", []
    took = [
        (end.run.steps * step_s + beside_s, end.seconds) for end in ended if end.run is not None and end.seconds > 0
    ]
    if not took:
        return "", []
    predicted, measured = (median(each) for each in zip(*took, strict=True))
    words = (
        f" A training took {duration(measured)} from its start to its end, the plan's model says {duration(predicted)}"
    )
    return f"{words} (modelled): error {predicted / measured - 1:+.1%}.", took


def _batch(made: PlanMade, config: Mapping[str, Any]) -> int:
    chosen = config.get(BATCH)
    return chosen if isinstance(chosen, int) else int(made.answer["size"]["batch_size"])


def _step_sentence(
    made: PlanMade, execution: ExecutionSettings, config: Mapping[str, Any], steps: Sequence[float]
) -> str:
    batch = _batch(made, config)
    predicted, measured = predicted_step(made, execution, batch), median(steps)
    mesh = execution.first_mesh if execution.mesh else Mesh(data=execution.workers)
    of = f"{execution.mechanism}, {mesh}, {execution.mode}, batch {batch}: a step was measured at {duration(measured)}"
    of += "" if len(steps) == 1 else f" (median of {count(len(steps), 'trial')})"
    if predicted is None:
        return f"{of}; the plan's model does not speak of this mechanism."
    slots = "" if execution.mode == "fast" else "; the plan speaks of fast mode, and slots take longer"
    return (
        f"{of}, the plan's model says {duration(predicted)} (modelled): error {predicted / measured - 1:+.1%}{slots}."
    )
