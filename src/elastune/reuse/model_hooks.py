"""The two functions of a program by which its kept models are used without training: ``build`` and ``predict``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import Diverged, UserError
from elastune.core.run import Program
from elastune.reuse.candidates import Candidate, Library
from elastune.reuse.weights import fill, weights_of
from elastune.train.predictions import complete_rows
from elastune.train.program.causes import cause_of
from elastune.train.program.digest import meaning
from elastune.train.program.guest import as_guest
from elastune.train.program.load import load_functions

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
    with as_guest():
        if found.study.data and "ELASTUNE_DATA" not in os.environ:
            os.environ["ELASTUNE_DATA"] = found.study.data
        loaded = load_functions(path, _HOOKS)
        build, predict = loaded["build"], loaded["predict"]
        if build is None or predict is None:
            lacks = "build" if build is None else "predict"
            raise UserError(f"a program whose kept models are used has {lacks}", path, _HOOKS[lacks])
        yield ModelHooks(path, build, predict)
