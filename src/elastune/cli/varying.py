"""Options by which an ensemble trains the members that it lacks, before any is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from elastune.cli import options, parse
from elastune.cli.clusters import ClusterOptions
from elastune.cli.output import print_error
from elastune.cli.setup import use_data
from elastune.core.errors import UserError
from elastune.core.text import plain

_FIX = "such as --vary inputs=temperature,pressure+humidity"


@dataclass(frozen=True)
class Varying:
    """In what members are to differ, and who trains those that are lacking."""

    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING=VALUE,...",
            help="First train trials for each value that the study lacks, such as seed=1,2,3. a+b is one value: two "
            "views of the inputs. May be repeated.",
        ),
    ] = None
    each: Annotated[int, typer.Option(help="With --vary: number of trials for each value.")] = 1
    workers: Annotated[
        int | None,
        typer.Option(help="With --vary: worker processes for all of its trainings together. [default: the study's]"),
    ] = None
    trial_workers: options.TrialWorkers = None

    def train(self, study: Path, where: ClusterOptions) -> bool:
        """Train what is lacking, where anything is to vary. Returns whether it was done; not, after Ctrl-C.

        Raises ``UserError``.
        """
        if self.vary is None:
            unused = Varying(None) != self or where != ClusterOptions()
            if unused:
                raise UserError("workers are for members that are trained", "no --vary", f"add it, {_FIX}")
            return True
        vary = self.values(self.vary)
        from elastune.cli.progress import Progress, StudyTracker, told_before
        from elastune.reuse.members import train_members
        from elastune.study.results.study import Study

        data = Study.load(study).data
        use_data(None if data is None else Path(data))
        with Progress(StudyTracker(None, None, told_before(study, True))) as progress:
            found = train_members(
                study,
                vary,
                each=self.each,
                workers=self.workers,
                trial_workers=parse.trial_workers(self.trial_workers),
                cluster=where.request(),
                observe=progress.observe,
            )
        for trial in found.trials:
            if trial.phase == "member" and trial.state == "infeasible" and _is_asked(trial.config, vary):
                settings = ", ".join(f"{name}={trial.config.get(name)}" for name in vary)
                print_error(f"trial {trial.number} ({plain(settings, 200)}) failed: {plain(trial.reason, 200)}")
        if found.ending == "interrupted":
            print_error("interrupted; the same command goes on")
        return found.ending != "interrupted"

    @staticmethod
    def values(texts: list[str]) -> dict[str, list[Any]]:
        """What "seed=1,2" and "inputs=a,b+c" say. Raises ``UserError``."""
        found: dict[str, list[Any]] = {}
        for text in texts:
            name, equals, rest = text.partition("=")
            name = name.strip()
            if not equals or not name.isidentifier():
                raise UserError("--vary is SETTING=VALUE,VALUE", repr(text)[:80], _FIX)
            if name in found:
                raise UserError("a setting is varied once", name, f"name all of its values together, {_FIX}")
            found[name] = [parse.value(name, part.strip()) for part in rest.split(",")]
        return found


def _is_asked(config: Mapping[str, Any], vary: Mapping[str, list[Any]]) -> bool:
    """Whether a trial of these settings is among what is varied now, not of another call before."""

    def is_it(found: Any, value: Any) -> bool:
        return found == value or (isinstance(value, str) and found == value.split("+"))

    return all(any(is_it(config.get(name), value) for value in values) for name, values in vary.items())
