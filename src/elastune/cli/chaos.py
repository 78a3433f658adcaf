"""What ``elastune run --chaos`` says at its end: what was done to the run, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastune.core.errors import UserError
from elastune.core.run import Elastic, Place, RunSpec
from elastune.core.text import count
from elastune.job.fault_injection import Chaos, Injector, Planned, parse_chaos
from elastune.job.output_dir import JOURNAL
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import RunFinished

VERIFIED = ("complete", "max_steps", "policy", "program")  # endings that an undisturbed run comes to, too


@dataclass(frozen=True)
class Verdict:
    """``data`` for --json, ``lines`` for people; ``good`` unless a step or sample was lost, or the weights differ."""

    data: dict[str, Any]
    lines: tuple[str, ...]
    good: bool


def verdict(entries: Sequence[Entry], undisturbed: str | None = None, missed: Sequence[str] = ()) -> Verdict:
    """Of the journal of a run. ``undisturbed``: the final sha256 of one without faults; ``missed``: faults that never
    came to their turn."""
    # Here: every run asks this file for its faults, and reports take a controller longer than it has for workers.
    from elastune.report.tables.changes import changes_line, gather_changes
    from elastune.report.tables.sample_ledger import ledger, lines

    changes, seen = gather_changes(entries), ledger(entries)
    ends = [entry.record for entry in entries if isinstance(entry.record, RunFinished)]
    lost = ends[-1].steps - seen.steps if ends else None
    equal = None if undisturbed is None or not ends else ends[-1].sha256 == undisturbed
    faults = dict(changes.faults)
    data = {
        "faults": faults,
        "missed": list(missed),
        "changes": len(changes.regroupings),
        "median_pause_s": changes.median_pause_s,
        "longest_pause_s": changes.longest_pause_s,
        "steps_discarded": changes.discarded,
        "steps_lost": lost,
        "ledger": {"exact": seen.exact, "steps": seen.steps, "samples": sum(e.once for e in seen.epochs)},
        "undisturbed_sha256": undisturbed,
        "equal": equal,
    }
    told = ", ".join(f"{number} {kind}" for kind, number in sorted(faults.items())) or "none"
    text = [f"chaos   faults injected: {told}"]
    text += [f"        at no time: {', '.join(missed)}"] if missed else []
    text += [f"        {line}" for line in (changes_line(changes),) if line]
    text += [f"        {count(lost, 'step')} lost"] if lost is not None else []
    text += [f"        {line}" for line in lines(seen, all_epochs=False)]
    if equal is not None:
        text.append(f"        {'the same' if equal else 'NOT the same'} state as an undisturbed run: {undisturbed}")
    good = seen.exact and lost in (0, None) and equal is not False
    return Verdict(data, tuple(text), good)


@dataclass(frozen=True)
class Faults:
    """What was asked for: nothing, faults, and whether to compare with a run without them."""

    chaos: Chaos | None = None
    verify: bool = False

    @classmethod
    def of(cls, text: str | None, verify: bool, mode: str, place: Place | None) -> Faults:
        """From the command line. Raises ``UserError``."""
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
        """What brings the faults upon the run."""
        if self.chaos is None:
            return None
        return Injector(self.chaos, spec.seed, epochs=epochs, max_steps=spec.max_steps)

    def verdict(self, spec: RunSpec, injector: Injector | None) -> Verdict | None:
        """On the run of ``spec``, which has ended. Where it was asked for and there is something to compare with, the
        same is trained again, on one worker that nothing happens to, in ``out/undisturbed``."""
        if injector is None:
            return None
        from elastune.job.run import run_job

        entries = read(spec.out / JOURNAL)
        ended = entries[-1].record
        calm = None
        if self.verify and isinstance(ended, RunFinished) and ended.stopped in VERIFIED:
            alone = replace(spec.means.on(1), mesh=None, copies=None)
            again = replace(spec, out=spec.out / "undisturbed", means=alone, elastic=Elastic(), resume=False)
            calm = run_job(replace(again, checkpoint_every_steps=0)).sha256
        missed = [f"{fault.kind}@{_point(fault)}" for fault in injector.left]
        return verdict(entries, calm, missed)


def _point(fault: Planned) -> str:
    return f"step:{fault.step}" if fault.part is None else f"{100 * fault.part:g}%"
