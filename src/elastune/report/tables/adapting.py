"""How a run adapted itself: what its monitors measured and what its policies decided, gathered from its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastune.core.text import count, number, plain, whole
from elastune.journal.entry import Entry
from elastune.journal.records import Decided, Measured, NotMeasured, PolicyFailed, Restarted, RunFinished, RunStarted
from elastune.plan.noise_scale import batch_against_noise
from elastune.report.tables.decision_text import NOISE_SCALE, OUTCOMES, Told, cause_text, change_text, signal_text
from elastune.report.tables.tables import Table
from elastune.study.results.trials import Trial


@dataclass(frozen=True)
class Adaptation:
    """Of the run's last attempt and what it went on from: the policies and monitors asked for, and all they told."""

    policies: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    decided: tuple[Decided, ...] = ()
    failed: tuple[PolicyFailed, ...] = ()
    unmeasured: tuple[NotMeasured, ...] = ()
    last_signals: Mapping[str, Told] | None = None

    @property
    def any(self) -> bool:
        """Whether it was to adapt or to measure, or something was decided; learners are measured in any run."""
        return bool(self.policies or self.monitors or self.decided or self.failed or self.unmeasured)

    @property
    def outcomes(self) -> Counter[str]:
        """How many decisions were applied, disagreed on, refused."""
        return Counter(each.outcome for each in self.decided)

    def signal(self, name: str) -> Told | None:
        """The last that was said of signal ``name``."""
        told = [self.last_signals or {}, *(m.signals for m in reversed(self.measured))]
        return next((signals[name] for signals in told if name in signals), None)


def gather_adaptation(entries: Iterable[Entry]) -> Adaptation:
    """What the journal of a run tells. What lay beyond the step that a run went on from is taken back."""
    policies: list[str] = []
    monitors: list[str] = []
    told: list[Measured | Decided | PolicyFailed] = []
    unmeasured: list[NotMeasured] = []
    last_signals: Mapping[str, Told] | None = None
    for record in (entry.record for entry in entries):
        match record:
            case RunStarted(adapt=adapt, resumed_step=step):
                policies, monitors = adapt.get("policies", []), adapt.get("monitors", [])
                told = [each for each in told if step is not None and each.step <= step]
                last_signals, unmeasured = None, []
            case Restarted(step=step):
                told = [each for each in told if each.step <= step]
            case Measured() | Decided() | PolicyFailed():
                told.append(record)
            case NotMeasured():
                unmeasured.append(record)
            case RunFinished(signals=signals):
                last_signals = signals
            case _:
                pass
    return Adaptation(
        policies=tuple(policies),
        monitors=tuple(monitors),
        measured=tuple(each for each in told if isinstance(each, Measured)),
        decided=tuple(each for each in told if isinstance(each, Decided)),
        failed=tuple(each for each in told if isinstance(each, PolicyFailed)),
        unmeasured=tuple(unmeasured),
        last_signals=last_signals,
    )


def adaptation_json(adaptation: Adaptation) -> dict[str, Any]:
    """The object ``adapt`` of a run's result; {} where nothing was asked for and nothing decided."""
    if not adaptation.any:
        return {}
    last = adaptation.measured[-1] if adaptation.measured else None
    noise_scale, error = adaptation.signal(NOISE_SCALE) or (None, None)
    return {
        "adapt": {
            "policies": list(adaptation.policies),
            "decisions": adaptation.outcomes["applied"],
            "disagreed": adaptation.outcomes["disagreed"],
            "refused": adaptation.outcomes["refused"],
            "failed": len(adaptation.failed),
            "not_measured": {each.monitor: each.why for each in adaptation.unmeasured},
            "noise_scale": noise_scale,
            "noise_scale_error": error,
            "batch_verdict": batch_line(adaptation) or None,
            "batch_size": last.batch_size if last else None,
            "lr": last.lr if last else None,
        }
    }


def adaptation_line(adaptation: Adaptation) -> str:
    """``3 decisions applied, 1 refused, noise scale 412 ± 30, batch 128, lr 0.0707``; empty without any."""
    outcomes = adaptation.outcomes
    parts = [f"{count(outcomes['applied'], 'decision')} applied"] if adaptation.policies or adaptation.decided else []
    parts += [f"{outcomes['disagreed']} that workers disagreed on"] if outcomes["disagreed"] else []
    parts += [f"{outcomes['refused']} refused"] if outcomes["refused"] else []
    parts += [f"{count(len(adaptation.failed), 'call')} of a policy failed"] if adaptation.failed else []
    parts += [f"{plain(each.monitor, 60).replace('_', ' ')} not measured" for each in adaptation.unmeasured]
    if adaptation.measured and adaptation.any:
        last = adaptation.measured[-1]
        parts += [signal_text(name, told) for name in (NOISE_SCALE,) if (told := adaptation.signal(name))]
        parts += [f"batch {last.batch_size}", f"lr {number(last.lr, 3)}"]
    return ", ".join(parts)


def batch_line(adaptation: Adaptation) -> str:
    """The run's last batch beside its noise scale, in a sentence; empty where none was measured."""
    told = adaptation.signal(NOISE_SCALE)
    if told is None or not adaptation.measured:
        return ""
    ended = NOISE_SCALE in (adaptation.last_signals or {})
    when = "at the end of training" if ended else "when last measured"
    words = batch_against_noise(adaptation.measured[-1].batch_size, *told, whose="the run's", when=when)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def trial_batch_line(trial: Trial) -> str:
    """The batch of a trial of a study beside its noise scale, in a sentence; empty where one of them is not known."""
    if trial.noise_scale is None or trial.batch_size is None:
        return ""
    tried = "; what it reaches was trained and measured, which outweighs this estimate"
    whose = f"trial {trial.number}'s"
    words = batch_against_noise(trial.batch_size, *trial.noise_scale, whose=whose, outweighed=tried)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def decisions_table(adaptation: Adaptation) -> Table:
    """One line a decision: when, whose, what, why, and what became of it."""
    rows = tuple(
        (
            whole(each.step),
            plain(each.policy, 60),
            change_text(each),
            cause_text(each.cause),
            plain(f"{OUTCOMES[each.outcome]}{f': {each.detail}' if each.detail else ''}", 300),
        )
        for each in adaptation.decided
    )
    return Table(f"Decisions ({len(rows)})", ("step", "policy", "what", "why", "outcome"), rows, frozenset({0}))


def failures_table(adaptation: Adaptation) -> Table:
    """One line a call of a policy that raised."""
    rows = tuple(
        (
            whole(each.step),
            plain(each.policy, 60),
            plain(each.hook),
            str(each.worker),
            plain(each.detail, 300),
            "switched off" if each.off else "",
        )
        for each in adaptation.failed
    )
    header = ("step", "policy", "hook", "worker", "error", "since then")
    return Table(f"Calls of policies that failed ({len(rows)})", header, rows, frozenset({0, 3}))
