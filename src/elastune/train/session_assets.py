"""The methods of a session that leave results for later trainings, and start from earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from elastune.core.errors import UserError
from elastune.core.start_from import StartFrom
from elastune.elastic.worker.state_owner import Packed
from elastune.journal.records import Record, StartedFrom
from elastune.journal.training import training_in
from elastune.train.checkpoints.beginning import note_beginning, noted_beginning
from elastune.train.checkpoints.checkpoint import complete, load_newest
from elastune.train.checkpoints.home import OutFolder
from elastune.train.checkpoints.start_from import start_from
from elastune.train.checkpoints.tree import fingerprint
from elastune.train.compiling import plain
from elastune.train.evaluations import Evaluations
from elastune.train.predictions import check_name, meet_and_keep, own_part
from elastune.train.progress import Progress, begun_of
from elastune.train.session_collectives import SessionCollectives
from elastune.train.unfreezing import Unfreezing, unfreezing


class SessionAssets(SessionCollectives):
    """The part of ``Session`` for weights and predictions that outlive a run."""

    _home: OutFolder
    _evaluations: Evaluations
    _snapshot: Packed | None
    _send: Callable[[Record], None]
    _refuse_inside: Callable[[str], None]
    _progress: Progress
    _unfreezing: tuple[Unfreezing, ...] = ()  # of each model
    _asked_to_start = 0  # how often

    def start_from(
        self,
        model: nn.Module,
        source: str | Path,
        *,
        rename: Mapping[str, str] = MappingProxyType({}),
        fresh: Sequence[str] = (),
    ) -> StartedFrom:
        """Start from another model's weights: copy the tensors of the same name and shape into ``model``.

        Call it before ``session.prepare``. Best call it before you make the optimizer: fresh tensors may then get a
        learning rate of their own. A resumed run continues from its own checkpoint: it copies nothing, and the source
        may be gone. A worker that joins does not read the source either, where it shares the run's folder.
        ``elastune run --start-from`` does the same without a change of the program.

        Args:
            model: The program's model; tensors that are not copied stay as they are.
            source: The folder of a run or a trial, or a safetensors file, on every worker's host.
            rename: How the source's names begin, and how they begin here: ``{"backbone.": "encoder."}``.
            fresh: Names here that are not copied, with ``*`` for anything: ``["head.*"]``.

        Returns:
            What was copied, what is fresh and why, as it was when the run began. The journal has it, too.

        Raises:
            UserError: For a source that cannot be read, and where nothing of it fits.

        Example:
            >>> told = session.start_from(model, "runs/pretrained", fresh=["head.*"])
            >>> groups = [{"params": [p], "lr": 0.1 if n in told.fresh else 0.01} for n, p in model.named_parameters()]
            >>> model, optimizer = session.prepare(model, torch.optim.SGD(groups))
        """
        if self.trained is not None:
            rule = "session.start_from comes before session.prepare"
            raise UserError(rule, "a call behind it", "move it before session.prepare")
        asked = StartFrom(Path(source), tuple(dict(rename).items()), _texts(fresh))
        nth, self._asked_to_start = self._asked_to_start, self._asked_to_start + 1
        if nth == 0 and self._snapshot is None and (self._goes_on or not self._workers.synchronised):
            self._progress.begun = self._begun_before()
        if nth < len(self._progress.begun):
            return self._progress.begun[nth]
        model = plain(model)
        told = start_from(model, asked)
        self._progress.begun.append(told)
        if self.rank == 0 and self._workers.synchronised:
            self._tell_beginning(model, told)
            note_beginning(self._home, self._progress.begun)
        return told

    def unfreeze(self, model: nn.Module, schedule: Mapping[str, int | None]) -> dict[str, int | None]:
        """Train the tensors of ``model`` from different epochs on, such as the head first and lower layers later.

        A frozen tensor has no gradient when the optimizer steps, so neither momentum nor weight decay changes it. Its
        gradient is still computed and summed: epochs take as long as before, and running statistics of normalising
        layers move. For a tensor that never trains, ``requires_grad_(False)`` before ``session.prepare`` is cheaper.

        Args:
            model: The program's model; each of several models has a schedule of its own, or none.
            schedule: Names, with ``*`` for anything, and the epoch (from 0) from which on they train; None: never. The
                first name that fits counts. It is plain data, so it may stand in the program's config.

        Returns:
            The first training epoch of each tensor, by name.

        Raises:
            UserError: For a schedule that leaves tensors out, names no tensor, or begins with nothing; and for a
                mechanism that divides the model.

        Example:
            >>> session.start_from(model, "runs/pretrained", fresh=["head.*"])
            >>> session.unfreeze(model, {"head.*": 0, "layer4.*": 2, "*": 4})
            >>> model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        """
        if self._spec.means.mechanism != "replicated":
            rule = "unfreezing needs whole tensors on every worker"
            raise UserError(rule, f"mechanism {self._spec.means.mechanism}", "use --mechanism replicated")
        found = unfreezing(plain(model), schedule)
        self._unfreezing = (*self._unfreezing, found)
        return dict(found.from_epoch)

    def _begin_with(self, model: nn.Module) -> None:
        """Do what ``--start-from`` asks for, on the worker whose initial state becomes that of all."""
        spec, workers = self._spec, self._workers
        if spec.start_from is None or self._snapshot is not None or not workers.synchronised or workers.rank != 0:
            return
        if self._goes_on and spec.spool is None and complete(spec.out / "checkpoints"):  # the source may be gone by now
            return
        self._tell_beginning(model, start_from(model, spec.start_from))

    @property
    def _goes_on(self) -> bool:
        """Whether the run begins where its newest checkpoint is, if there is one."""
        return self._spec.resume or self._workers.restart_from_checkpoint

    def _begun_before(self) -> list[StartedFrom]:
        """What its newest checkpoint, which takes the model's place, tells of its beginning.

        Without one a joiner, which others will give their state, finds it noted; nothing else does.
        """
        newest = load_newest(self._spec.out / "checkpoints", lambda path, files: "", whole_parts=False)
        if newest is not None:
            return begun_of(newest[1].states[Progress.name])
        return [] if self._workers.synchronised else noted_beginning(self._spec.out)

    def _tell_beginning(self, model: nn.Module, told: StartedFrom) -> None:
        """To the journal: whoever makes something of several trials has to know whether they began alike."""
        begins = fingerprint({n: tensor for n, tensor in model.state_dict().items() if hasattr(tensor, "shape")})
        before = training_in(Path(told.source))
        known_s = None if before is None or before.untold else before.worker_seconds
        self._send(replace(told, begins=begins, worker_seconds=known_s))

    def predictions(self, name: str, outputs: Any, targets: Any) -> None:
        """Keep the model's predictions on a data set, in the order of its samples, for ensembles (docs/ensembles.md).

        Every worker must call this after an evaluation of the whole data set, with the rows of its own batches. The
        file in the run's folder has the same bytes for any number of workers. A later call with the same name replaces
        the file.

        Args:
            name: The name of the data set. A name that begins with "test" is for data that no choice may rest on.
            outputs: Logits, probabilities or values: a tensor, or a list with one tensor for each batch; rows are
                samples.
            targets: The right answers, in the same form.

        Raises:
            UserError: For rows that are not those of the newest evaluation, for targets that are not finite numbers,
                and where the file cannot be written.
            Diverged: For outputs that are not finite.

        Example:
            >>> outputs, targets = [], []
            >>> for x, y in session.batches(data.validation, batch_size=100, train=False):
            ...     outputs.append(model(x))
            ...     targets.append(y)
            >>> session.predictions("validation", outputs, targets)
        """
        self._refuse_inside("predictions")
        check_name(name)
        spec, workers = self._spec, self._workers
        if spec.spool is not None:
            rule, fix = "predictions lie in a folder that all workers share", "use a cluster without folder=local"
            raise UserError(rule, "a folder of each host's own", fix)
        seen = self._evaluations.seen
        parts = self._evaluations.meet_bytes(own_part(seen, outputs, targets), f"session.predictions({name})")
        if not workers.synchronised:  # on the way back to where the run is: what was kept there stands
            return
        place = spec.out, self._home, name, self.step
        if (kept := meet_and_keep(workers, parts, seen.length, *place)) is not None:
            self._send(kept)


def _texts(given: Sequence[str]) -> tuple[str, ...]:
    """Names, and not the letters of one."""
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise UserError("fresh is a list of names", repr(given)[:80], 'such as ["head.*"]')
    return tuple(given)
