"""Ask the kept trials of a study about a data set, without training, by the program's ``build`` and ``predict``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import Diverged, UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import PredictionsAdded
from elastune.core.run import Program
from elastune.runtime.clusters.base import LocalFiles
from elastune.runtime.job.output import JOURNAL
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.predictions import check_name, complete_rows, file_of, keep
from elastune.train.program.errors import cause_of
from elastune.train.program.load import load_functions, process_restored
from elastune.train.program.source import meaning
from elastune.tune.reuse.kept_models import Candidate, Library, fill, library, weights_of
from elastune.tune.study.results import Study

# [model hooks] The two functions of a program by which its kept models are used without training: ``build`` and ``predict``.

_HOOKS = {
    "build": "def build(config): return the model that train makes of these settings",
    "predict": "def predict(model, name): return outputs, targets; None for a data set it does not know",
}


@dataclass(frozen=True)
class ModelHooks:
    """``build`` and ``predict`` of the program in ``path``."""

    path: Path
    build: Callable[[dict[str, Any]], nn.Module]
    predict: Callable[[nn.Module, str], Any]

    def made(self, config: dict[str, Any]) -> nn.Module:
        """Return a model with these settings. Raises ``UserError``."""
        try:
            model: object = self.build(dict(config))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
            raise self._broken("build(config)", error) from None
        if not isinstance(model, nn.Module):
            raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
        return model

    def model_of(self, candidate: Candidate) -> nn.Module:
        """Return the model that a trial has left, in evaluation mode. Raises ``UserError``."""
        model = self.made(candidate.config)
        fill(model, weights_of(candidate), f"of trial {candidate.trial}")
        return model.eval()

    def said(self, model: nn.Module, name: str) -> dict[str, torch.Tensor] | None:
        """Return outputs and targets on the data set ``name``, in the order of its samples.

        The result is None where the program does not know the data set.

        Raises:
            UserError: For a result that is no prediction.
            Diverged: For outputs that are not finite.
        """
        try:
            with torch.no_grad():
                found = self.predict(model, name)
        except (UserError, Diverged):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
            raise self._broken(f"predict(model, {name!r})", error) from None
        if found is None:
            return None
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise UserError("predict(model, name) gives outputs and targets", type(found).__name__, "return both")
        return complete_rows(found[0], found[1])

    def known(self, model: nn.Module, name: str) -> dict[str, torch.Tensor]:
        """Return the same for data that the program must know. Raises ``UserError`` and ``Diverged``."""
        found = self.said(model, name)
        if found is None:
            raise UserError("predict(model, name) knows the data set", name, "return its outputs and targets")
        return found

    def _broken(self, call: str, error: BaseException) -> UserError:
        return UserError(f"{call} of a program ends without an error", cause_of(error, str(self.path)), "mend it")


@contextmanager
def hooks_of(found: Library, program: Path | None = None) -> Iterator[ModelHooks]:
    """Yield the hooks of ``program``, or of the file that the study was begun with, if it trains as it did then.

    What the program does to this process is undone at the end.

    Raises:
        UserError: Where there is no such file, it lacks a hook, or it has changed.
    """
    path = (program or Path(found.study.program)).resolve()
    begun = Program(path, found.settings.get("train", "train"))
    if program is None and path.is_file() and meaning(begun) != found.settings.get("meaning"):
        fix = "name it if it builds the same models all the same: --program FILE"
        raise UserError("a study's program trains as it did when it began", f"{path} has changed", fix)
    with process_restored():
        if found.study.data and "ELASTUNE_DATA" not in os.environ:
            os.environ["ELASTUNE_DATA"] = found.study.data
        loaded = load_functions(path, _HOOKS)
        build, predict = loaded["build"], loaded["predict"]
        if build is None or predict is None:
            lacks = "build" if build is None else "predict"
            raise UserError(f"a program whose kept models are used has {lacks}", path, _HOOKS[lacks])
        yield ModelHooks(path, build, predict)


# [predict] Ask the kept trials of a study about a data set, long after they were trained, by the program's own functions.


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
        shelf = _PredictionWriter(
            journal, out, found.settings.get("keep_bytes"), {a.trial: a.size for a in found.study.kept}
        )
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


def _asked(one: Candidate, name: str, model: nn.Module, hooks: ModelHooks, shelf: _PredictionWriter) -> Prediction:
    try:
        whole = hooks.known(model, name)
    except Diverged as error:
        return Prediction(one.trial, name, 0, str(error))
    shelf.put(one, name, whole)
    return Prediction(one.trial, name, len(whole["targets"]))


@dataclass
class _PredictionWriter:
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
