"""Tell a study's journal what was made of its trials, so that reports and picks know of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from elastune.core.errors import UserError
from elastune.job.output_dir import JOURNAL
from elastune.journal.records import AssetMade, AssetMember, AssetPart, SingleScore
from elastune.journal.training import training_together
from elastune.journal.writer import JournalWriter, check_unwritten
from elastune.reuse.composed import ComposedModel
from elastune.reuse.ensemble import Ensemble
from elastune.reuse.soup_study import StudySoup


def record_asset(found: Ensemble | StudySoup | ComposedModel, file: str | Path) -> AssetMade:
    """Tell the study that ``found`` was written to ``file``; it is then a point of ``Study.assets``.

    Args:
        found: A result of ``ensemble``, ``Study.soup`` or ``judge_model``.
        file: The file that ``save_ensemble``, ``Soup.save`` or ``save_composed`` has written.

    Returns:
        The record.

    Raises:
        UserError: Where there is no such file, or the study's journal is being written.

    Example:
        >>> found = study.ensemble()
        >>> elastune.record_asset(found, elastune.save_ensemble(found, "ensemble.safetensors"))
    """
    path = Path(file).resolve()
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError("what is recorded was written before", error, "call save_ensemble, or soup.save") from None
    if isinstance(found, ComposedModel):
        record = _of_composed(found, path, digest)
    else:
        record = _of_ensemble(found, path, digest) if isinstance(found, Ensemble) else _of_soup(found, path, digest)
    with JournalWriter(found.study / JOURNAL) as journal:
        journal.write(record, durable=True)
    return record


def check_recordable(study: Path) -> None:
    """Raise ``UserError`` where the study could not be told now; for use before something is chosen and written."""
    check_unwritten(study / JOURNAL)


def _of_ensemble(found: Ensemble, path: Path, digest: str) -> AssetMade:
    return AssetMade(
        form="ensemble",
        method=found.method,
        members=[AssetMember(member.trial, member.weight) for member in found.members],
        data=found.data,
        objective=found.objective,
        direction=found.direction,
        score=found.score,
        test=None if found.test is None else found.test.ensemble,
        parameters=sum(member.parameters for member in found.members),
        singles=[SingleScore(one.trial, one.score, one.parameters) for one in found.singles],
        file=str(path),
        sha256=digest,
    )


def _of_soup(found: StudySoup, path: Path, digest: str) -> AssetMade:
    soup = found.soup
    return AssetMade(
        form="soup",
        method=found.how,
        members=[AssetMember(trial, 1 / len(soup.trials)) for trial in soup.trials],
        data=found.data,
        objective=found.objective,
        direction=found.direction,
        score=soup.score,
        test=None if found.test is None else found.test.soup,
        parameters=found.parameters,
        singles=[SingleScore(one.trial, one.score, one.parameters) for one in found.singles],
        file=str(path),
        sha256=digest,
    )


def _of_composed(found: ComposedModel, path: Path, digest: str) -> AssetMade:
    """All of its training is told as that of parts, those of this study, too: some began with others' weights."""
    took = training_together((one.study, one.trial) for one in found.made_of)
    return AssetMade(
        form=found.form,
        method=found.method,
        members=[],
        data=found.data,
        objective=found.objective,
        direction=found.direction,
        score=found.score,
        test=None if found.test is None else found.test.model,
        parameters=found.parameters,
        singles=list(found.singles),
        file=str(path),
        sha256=digest,
        parts=[AssetPart(str(one.study), one.trial) for one in found.made_of],
        parts_s=took.worker_seconds,
        untold=list(took.untold),
    )
