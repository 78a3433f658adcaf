"""The end of ``elastune run --chaos``: which faults were injected, and whether the run survived them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from elastune.core.errors import UserError
from elastune.core.formatting import count
from elastune.core.journal.files import read
from elastune.core.journal.records import Entry, FaultInjected, RunFinished
from elastune.core.run import Elastic, Place, RunSpec
from elastune.runtime.job.fault_injection import Chaos, Injector, parse_chaos
from elastune.runtime.job.output import JOURNAL

VERIFIED = ("complete", "max_steps", "policy", "program")  # endings that an undisturbed run comes to, too


@dataclass(frozen=True)
class Verdict:
    """Whether a run survived its faults: ``data`` for --json, ``lines`` for people.

    ``good`` is false if a step or sample was lost, if the weights differ, or if the comparison did not take place.
    """

    data: dict[str, Any]
    lines: tuple[str, ...]
    good: bool


def verdict(
    entries: Sequence[Entry],
    undisturbed: str | None = None,
    not_injected: Mapping[str, str] = MappingProxyType({}),
    *,
    verified: bool | None = None,
) -> Verdict:
    """Of the journal of a run.

    ``undisturbed``: the final sha256 of one without faults. ``not_injected``: what was asked for and has not happened,
    and why not. ``verified``: whether enough has happened for a comparison to show what was asked; None where none was
    asked for.
    """
    # Here: every run asks this file for its faults, and reports take a controller longer than it has for workers.
    from elastune.report.sample_ledger import ledger, lines
    from elastune.report.worker_changes import changes_line, gather_changes

    changes, seen = gather_changes(entries), ledger(entries)
    ends = [entry.record for entry in entries if isinstance(entry.record, RunFinished)]
    lost = ends[-1].steps - seen.steps if ends else None
    equal = None if undisturbed is None or not ends else ends[-1].sha256 == undisturbed
    faults = dict(changes.faults)
    data = {
        "faults": faults,
        "not_injected": dict(not_injected),
        "changes": changes.number,
        "median_pause_s": changes.median_pause_s,
        "longest_pause_s": changes.longest_pause_s,
        "steps_discarded": changes.discarded,
        "steps_lost": lost,
        "ledger": {"exact": seen.exact, "steps": seen.steps, "samples": sum(e.once for e in seen.epochs)},
        "undisturbed_sha256": undisturbed,
        "equal": equal,
        "verified": verified,
    }
    faults_text = ", ".join(f"{number} {kind}" for kind, number in sorted(faults.items())) or "none"
    text = [f"chaos   faults injected: {faults_text}"]
    text += [f"        not injected: {name} ({why})" for name, why in not_injected.items()]
    text += [f"        {line}" for line in (changes_line(changes),) if line]
    text += [f"        {count(lost, 'step')} lost"] if lost is not None else []
    text += [f"        {line}" for line in lines(seen, all_epochs=False)]
    text += [f"        {line}" for line in (_compared(equal, faults_text, not_injected, undisturbed),) if line]
    if verified is False:
        text.append("        NOT verified: not all that was to be survived has happened")
    good = seen.exact and lost in (0, None) and equal is not False and verified is not False
    return Verdict(data, tuple(text), good)


def _compared(equal: bool | None, faults_text: str, not_injected: Mapping[str, str], undisturbed: str | None) -> str:
    if equal is None:
        return ""
    if not equal:
        return f"NOT the same state as an undisturbed run: {undisturbed}"
    if not_injected:  # "the same state" would seem to cover the faults that did not happen
        return f"equal to an undisturbed run as far as {faults_text} can show: {undisturbed}"
    return f"the same state as an undisturbed run: {undisturbed}"


@dataclass(frozen=True)
class Faults:
    """The faults to inject into a run, if any, and whether to compare it with an undisturbed run."""

    chaos: Chaos | None = None
    verify: bool = False

    @classmethod
    def of(cls, text: str | None, verify: bool, mode: str, place: Place | None) -> Faults:
        """Return the faults that --chaos and --chaos-verify name. Raises ``UserError`` if the run cannot have them."""
        if text is None:
            if verify:
                raise UserError("--chaos-verify needs faults", "no --chaos", "such as --chaos kill@40%")
            return cls()
        if place is not None:
            raise UserError("faults need workers that elastune has started", "a launcher", "run it without torchrun")
        if verify and mode != "exact":
            rule = "only exact mode promises the same state whatever happens"
            raise UserError(rule, f"--mode {mode}", "use --mode exact, or leave --chaos-verify out")
        return cls(parse_chaos(text), verify)

    def injector(self, spec: RunSpec, epochs: int | None) -> Injector | None:
        """Return the injector of the faults; None without faults."""
        if self.chaos is None:
            return None
        return Injector(self.chaos, spec.seed, epochs=epochs, max_steps=spec.max_steps)

    def verdict(self, spec: RunSpec, injector: Injector | None) -> Verdict | None:
        """Return the verdict on the run of ``spec``, which has ended; None without faults.

        With ``verify``, and if a fault happened and the run finished, the same training runs again undisturbed on one
        worker, in ``out/undisturbed``.
        """
        if injector is None:
            return None
        from elastune.runtime.job.run import run_job

        entries, missing = read(spec.out / JOURNAL), injector.not_injected
        happened = any(isinstance(entry.record, FaultInjected) for entry in entries)
        ended = entries[-1].record
        if not (self.verify and isinstance(ended, RunFinished) and ended.stopped in VERIFIED):
            return verdict(entries, None, missing)
        if not happened:  # two undisturbed runs would be compared
            return verdict(entries, None, missing, verified=False)
        alone = replace(spec.execution.on(1), mesh=None, copies=None)
        again = replace(spec, out=spec.out / "undisturbed", execution=alone, elastic=Elastic(), resume=False)
        calm = run_job(replace(again, checkpoint_every_steps=0)).sha256
        return verdict(entries, calm, missing, verified=not injector.planned_missing)
