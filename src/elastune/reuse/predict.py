"""Ask the kept trials of a study about a data set, long after they were trained, by the program's own functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.cluster.run_files import LocalFiles
from elastune.core.errors import Diverged, UserError
from elastune.job.output_dir import JOURNAL
from elastune.journal.records import PredictionsAdded
from elastune.journal.writer import JournalWriter
from elastune.reuse.candidates import Candidate, library
from elastune.reuse.model_hooks import ModelHooks, hooks_of
from elastune.study.results.study import Study
from elastune.train.checkpoints.home import OutFolder
from elastune.train.predictions import check_name, file_of, keep


@dataclass(frozen=True)
class Prediction:
    """What became of one trial's predictions on ``data``: ``rows`` were written, or 0 for the ``reason``."""

    trial: int
    data: str
    rows: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def predict(
    study: Study | str | Path,
    data: Sequence[str],
    *,
    trials: Sequence[int] | None = None,
    program: str | Path | None = None,
    again: bool = False,
) -> list[Prediction]:
    """Ask the kept trials of a study about data sets, and keep their predictions as ``session.predictions`` does.

    The program's ``build(config)`` makes the model of each trial. Its weights are loaded, and ``predict(model, name)``
    gives outputs and targets of all samples. Existing predictions stay as they are, so after an interruption simply
    call this again.

    Args:
        study: The study, or its folder; nothing else may write its journal now.
        data: Names of data sets. A name that begins with "test" is allowed: no choice rests on it.
        trials: The trials to ask; None: all that were kept.
        program: The file with ``build`` and ``predict``; None: the file that the study was begun with, if it trains as
            it did then.
        again: Ask again where there are predictions.

    Returns:
        What was written and what was not, in the order of trials.

    Raises:
        UserError: For a program that lacks a function, knows no such data or makes another model; for predictions that
            exceed the study's ``--keep-size``; and where the study runs.

    Example:
        >>> elastune.predict("out", ["validation", "test_rotated"])
    """
    names = [data] if isinstance(data, str) else list(dict.fromkeys(data))
    if not names:
        raise UserError("a prediction is of a data set", "none", "name one, such as validation")
    for name in names:
        check_name(name)
    out = library(study).out  # refuses what is no study, before anything is made there
    with JournalWriter(out / JOURNAL) as journal:
        found = library(out)
        asked, told = found.asked(trials), []
        shelf = _Shelf(journal, out, found.settings.get("keep_bytes"), {a.trial: a.size for a in found.study.kept})
        with hooks_of(found, None if program is None else Path(program)) as hooks:
            for one in asked:
                model: nn.Module | None = None
                for name in names:
                    if name in one.artifact.predictions and not again:
                        told.append(Prediction(one.trial, name, 0, "is there already"))
                        continue
                    model = hooks.model_of(one) if model is None else model.eval()
                    told.append(_asked(one, name, model, hooks, shelf))
    return told


def _asked(one: Candidate, name: str, model: nn.Module, hooks: ModelHooks, shelf: _Shelf) -> Prediction:
    try:
        whole = hooks.known(model, name)
    except Diverged as error:
        return Prediction(one.trial, name, 0, str(error))
    shelf.put(one, name, whole)
    return Prediction(one.trial, name, len(whole["targets"]))


@dataclass
class _Shelf:
    """Writes predictions into the trials' folders, and tells the journal; ``sizes``: of all that stays, by trial."""

    journal: JournalWriter
    out: Path
    most_bytes: int | None
    sizes: dict[int, int]

    def put(self, one: Candidate, name: str, whole: dict[str, torch.Tensor]) -> None:
        new, old = sum(tensor.nbytes for tensor in whole.values()), file_of(one.folder, name)
        there = sum(self.sizes.values()) - (old.stat().st_size if old.is_file() else 0)  # whose place the new one takes
        if self.most_bytes is not None and there + new > self.most_bytes:
            rule = f"all that a study keeps has at most the {self.most_bytes:,} bytes of its --keep-size"
            raise UserError(
                rule, f"{there + new:,} with {name} of trial {one.trial}", "ask fewer trials, or other data"
            )
        kept = keep(one.folder, OutFolder.found(one.folder), name, whole, one.artifact.step)
        self.sizes[one.trial] = size = LocalFiles().size_bytes(one.folder)
        self.journal.write(PredictionsAdded(one.trial, name, kept.samples, size, kept.sha256), durable=True)
