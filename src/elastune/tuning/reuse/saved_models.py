"""Save what was made of a study's trials: as one file to share, and in the journal for reports.

A file is safetensors with JSON in the header, and reading it executes none of its content. The header has the
SHA-256 of the whole file, computed with zeros in the digest's place. So a changed byte, a cut and an addition are
found before anything is parsed. A digest finds damage, not malice, so the content is checked as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, atomic_write, check_unwritten
from elastune.core.journal.folds import training_of_studies
from elastune.core.journal.records import AssetMade, AssetMember, AssetPart, SingleScore
from elastune.runtime.job.output import JOURNAL
from elastune.tuning.reuse.class_tree import class_tree
from elastune.tuning.reuse.composed_models import Composed, ComposedModel, JoinedModel, StackedParts, View, whole_input
from elastune.tuning.reuse.ensemble import Ensemble, EnsembleModel
from elastune.tuning.reuse.kept_models import Build, built, check_file, fill, library, tensors_of, weights_of
from elastune.tuning.reuse.predictions import LARGEST_BYTES, Task
from elastune.tuning.reuse.soup import StudySoup

# --- any model as one file ---

Content = TypeVar("Content")
KEY, DIGEST = "elastune", "sha256"
LONGEST = 1 << 24  # characters of JSON
_LONGEST_HEADER = 100_000_000  # bytes; the bound of safetensors
_ZEROS = b"0" * 64
_SEALED = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_CHUNK = 1 << 20


def write_model_file(path: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a description and tensors; the file appears whole or not at all.

    Args:
        path: The file; an existing file is replaced.
        content: The description in the header: JSON values.
        tensors: Tensors by name; no two share memory.

    Raises:
        UserError: If the file cannot be written, or a tensor holds a NaN.
    """
    unfit = not_numbers(tensors)
    if unfit is not None:
        raise UserError("a model that is written has numbers as weights", f"NaN in {unfit}", "leave that trial out")
    metadata = {KEY: json.dumps(content), DIGEST: _ZEROS.decode()}
    unsealed = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    digest = hashlib.sha256(unsealed).hexdigest().encode()
    try:
        atomic_write(path, unsealed.replace(b'"sha256":"' + _ZEROS, b'"sha256":"' + digest, 1))
    except OSError as error:
        raise UserError("a model must be writable", error, "free space, or name a file in another folder") from None


def read_model_file(path: Path, schema: type[Content], what: str) -> tuple[Content, dict[str, torch.Tensor]]:
    """Return the description and the tensors in the file at ``path``.

    Args:
        path: A file from ``write_model_file``.
        schema: The dataclass that the description must fit.
        what: The kind of model, such as "an ensemble"; for messages.

    Raises:
        UserError: For any other file, and for a file that has changed since it was written.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        _check_digest(path, what)
        with safe_open(path, "pt") as opened:
            text = (opened.metadata() or {}).get(KEY, "")
            if not text or len(text) > LONGEST:
                raise ValueError(f"it is not {what}")
            content = TypeAdapter(schema).validate_python(json.loads(text))
            tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
        unfit = not_numbers(tensors)
        if unfit is not None:
            raise ValueError(f"NaN in {unfit}")
        return content, tensors
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        why = str(error)
    raise not_a_model_file(path, why, what)


def not_a_model_file(path: Path, why: str, what: str) -> UserError:
    """Return the error for a file that is not ``what``."""
    return UserError(f"{what} is a file that elastune has written", f"{path}: {why[:200]}", "write it again")


def not_numbers(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that has a NaN. Infinities are allowed: a mask of attention has them."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and math.isnan(float(tensor.sum())) and bool(tensor.isnan().any()):
            return name
    return None


def _check_digest(path: Path, what: str) -> None:
    """Raise ``ValueError`` if the file does not match the digest in its header."""
    with path.open("rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > min(_LONGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"it is not {what}")
        header = file.read(size)
        carried = _SEALED.findall(header)
        if len(carried) != 1:  # the description cannot match: its quotation marks are escaped
            raise ValueError(f"it is not {what}, or it was damaged since")
        digest = hashlib.sha256(length + header.replace(carried[0], _ZEROS, 1))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest().encode() != carried[0]:
        raise ValueError("its bytes do not have the digest that it was written with")


# --- an ensemble as one file ---

ENSEMBLE_FORMAT = 2
MOST_MEMBERS = 1000
WIDEST = LARGEST_BYTES // 8
"""The most numbers that one sample can have: larger predictions do not fit into memory."""
_ENSEMBLE = "an ensemble"
_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class FileMember:
    """One member in the file of an ensemble; the names of its tensors begin with its place."""

    trial: int
    weight: Annotated[float, Field(gt=0, le=1)]
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class FileContent:
    """The description in the header of an ensemble's file."""

    format: Literal[2]
    kind: Literal["classification", "regression"]
    output_kind: Literal["logits", "probabilities", "values"]
    width: Annotated[int, Field(ge=1, le=WIDEST)]
    members: Annotated[list[FileMember], Field(min_length=1, max_length=MOST_MEMBERS)]
    about: dict[str, Any]

    @property
    def task(self) -> Task:
        """The kind of problem."""
        return Task(self.kind, self.output_kind, self.width)


def save_ensemble(ensemble: Ensemble, file: str | Path) -> Path:
    """Write the weights and the description of an ensemble as one file; it appears whole or not at all.

    Args:
        ensemble: An ensemble from ``ensemble``; the folder of its study must be unchanged.
        file: The path; an existing file is replaced.

    Returns:
        The path.

    Raises:
        UserError: If weights are missing, damaged or NaN, or the file cannot be written.

    Example:
        >>> elastune.save_ensemble(elastune.ensemble("out", members=8), "ensemble.safetensors")
    """
    path = Path(file)
    check_file(path)
    candidates = {candidate.trial: candidate for candidate in library(ensemble.study).candidates}
    tensors: dict[str, torch.Tensor] = {}
    for place, member in enumerate(ensemble.members):
        if member.trial not in candidates:
            rule = "the weights of all members stay where they are until the ensemble is written"
            raise UserError(rule, f"trial {member.trial} of {ensemble.study}", "choose anew")
        tensors |= {f"{place}.{name}": tensor for name, tensor in weights_of(candidates[member.trial]).items()}
    content = {
        "format": ENSEMBLE_FORMAT,
        "kind": ensemble.task.kind,
        "output_kind": ensemble.task.output_kind,
        "width": ensemble.task.width,
        "members": [{"trial": m.trial, "weight": m.weight, "config": m.config} for m in ensemble.members],
        "about": {
            "study": ensemble.study.name,
            "method": ensemble.method,
            "objective": ensemble.objective,
            "data": ensemble.data,
            "score": ensemble.score,
            "test": None if ensemble.test is None else ensemble.test.ensemble,
        },
    }
    write_model_file(path, content, tensors)
    return path


def load_ensemble(file: str | Path, build: Build) -> EnsembleModel:
    """Return the ensemble in ``file`` as one module, on the CPU and in evaluation mode.

    Args:
        file: A file from ``save_ensemble`` or ``elastune ensemble --out``.
        build: Makes the program's model from the settings of a trial: ``build(config)``.

    Returns:
        A module that takes a batch and gives probabilities of classes, or values.

    Raises:
        UserError: For any other file, one that has changed since, and where ``build`` fails or makes models with other
            names or shapes.

    Example:
        >>> model = elastune.load_ensemble("ensemble.safetensors", lambda config: make_model(config["width"]))
        >>> model(x).argmax(1)
    """
    path = Path(file)
    content, tensors = read_model_file(path, FileContent, _ENSEMBLE)
    _check(path, content, tensors)
    models = []
    for place, member in enumerate(content.members):
        model = built(build, member.config, f"of trial {member.trial} in {path}")
        prefix = f"{place}."
        fill(model, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, f"in {path}")
        models.append(model)
    return EnsembleModel(models, [member.weight for member in content.members], content.task).eval()


def _check(path: Path, content: FileContent, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ``UserError`` if parts of the file contradict each other."""
    total = sum(member.weight for member in content.members)
    places = {str(place) for place in range(len(content.members))}
    stray = next((name for name in tensors if name.partition(".")[0] not in places), None)
    if not math.isclose(total, 1, abs_tol=1e-6):
        why = f"its weights add up to {total:g}"
    elif (content.kind == "regression") != (content.output_kind == "values"):
        why = f"{content.output_kind} of a {content.kind}"
    elif stray is not None:
        why = f"{stray} belongs to none of its {len(content.members)} members"
    else:
        return
    raise not_a_model_file(path, why, _ENSEMBLE)


# --- a joined or stacked model as one file ---

COMPOSED_FORMAT = 2
_COMPOSED = "a joined or stacked model"
MOST_PARTS = 10_000


@dataclass(frozen=True, config=_RULES)
class FilePart:
    """One part in the file of a joined or stacked model: its trial, its study, and its settings."""

    study: str
    trial: int
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class ComposedContent:
    """The description in the header of a joined or stacked model's file.

    Attributes:
        tree: For a joined model, its tree.
        head: For a stacked model, the inputs and outputs of its head.
    """

    format: Literal[2]
    form: Literal["joined", "stacked"]
    parts: Annotated[list[FilePart], Field(min_length=1, max_length=MOST_PARTS)]
    tree: list[Any] | None = None
    head: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None


def save_composed(model: Composed, file: str | Path) -> Path:
    """Write a model from ``join`` or ``stacked_parts``; the file appears whole or not at all.

    Args:
        model: The model, with its current weights.
        file: The path; an existing file is replaced.

    Returns:
        The path.

    Raises:
        UserError: For a model that was built otherwise, for weights that are NaN, and if the file cannot be written.

    Example:
        >>> elastune.save_composed(elastune.join("gate", "parts", build, tree), "joined.safetensors")
    """
    path = Path(file)
    check_file(path)
    parts = len(model.models if isinstance(model, JoinedModel) else model.parts)
    if len(model.source_trials) < parts:
        raise UserError("a model that is written knows its parts' settings", "made of nothing", "build it by join")
    content = {
        "format": COMPOSED_FORMAT,
        "form": "joined" if isinstance(model, JoinedModel) else "stacked",
        "parts": [
            {"study": source.study.name, "trial": source.trial, "config": source.config}
            for source in model.source_trials[:parts]
        ],
        "tree": model.tree.to_json() if isinstance(model, JoinedModel) else None,
        "head": None if isinstance(model, JoinedModel) else [model.head.in_features, model.head.out_features],
    }
    write_model_file(path, content, {name: tensor.clone() for name, tensor in tensors_of(model).items()})
    return path


def load_composed(file: str | Path, build: Build, view: View = whole_input) -> Composed:
    """Return the model in ``file``, on the CPU and in evaluation mode.

    Args:
        file: A file from ``save_composed`` or ``elastune join --out``.
        build: Makes the program's model from the settings of a part.
        view: For a stacked model, the part of the inputs that each part sees, as for ``stacked_parts``.

    Returns:
        The module.

    Raises:
        UserError: For any other file, one that has changed since, and where ``build`` fails or makes models with other
            names or shapes.

    Example:
        >>> model = elastune.load_composed("joined.safetensors", build)
    """
    path = Path(file)
    content, tensors = read_model_file(path, ComposedContent, _COMPOSED)
    if (content.tree is None) != (content.form == "stacked") or (content.head is None) != (content.form == "joined"):
        wants = "tree and no head" if content.form == "joined" else "head and no tree"
        raise not_a_model_file(path, f"a {content.form} model has a {wants}", _COMPOSED)
    models = [built(build, part.config, f"of trial {part.trial} in {path}") for part in content.parts]
    whole: Composed
    if content.tree is not None:
        tree = class_tree(content.tree)
        if len(tree.nodes()) != len(models):
            raise not_a_model_file(path, f"{len(models)} parts of {len(tree.nodes())} nodes", _COMPOSED)
        whole = JoinedModel(dict(zip(tree.nodes(), models, strict=True)), tree)
    else:
        assert content.head is not None
        inputs, outputs = content.head
        if "head.weight" not in tensors or tuple(tensors["head.weight"].shape) != (outputs, inputs):
            raise not_a_model_file(path, f"no head of {inputs} inputs and {outputs} outputs", _COMPOSED)
        whole = StackedParts(models, [part.config for part in content.parts], view, nn.Linear(inputs, outputs))
    fill(whole, tensors, f"in {path}")
    return whole.eval()


# --- recording models in a study's journal, so that reports and picks include them ---


def record_asset(asset: Ensemble | StudySoup | ComposedModel, file: str | Path) -> AssetMade:
    """Record in the study's journal that ``asset`` was written to ``file``; it is then a point of ``Study.assets``.

    Args:
        asset: A result of ``ensemble``, ``Study.soup`` or ``judge_model``.
        file: The file that ``save_ensemble``, ``Soup.save`` or ``save_composed`` has written.

    Returns:
        The record.

    Raises:
        UserError: If there is no such file, or another process is writing the study's journal.

    Example:
        >>> found = study.ensemble()
        >>> elastune.record_asset(found, elastune.save_ensemble(found, "ensemble.safetensors"))
    """
    path = Path(file).resolve()
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError("what is recorded was written before", error, "call save_ensemble, or soup.save") from None
    if isinstance(asset, ComposedModel):
        record = _of_composed(asset, path, digest)
    else:
        record = _of_ensemble(asset, path, digest) if isinstance(asset, Ensemble) else _of_soup(asset, path, digest)
    with JournalWriter(asset.study / JOURNAL) as journal:
        journal.write(record, durable=True)
    return record


def check_recordable(study: Path) -> None:
    """Raise ``UserError`` if the study's journal cannot be written now. Call it before a model is chosen."""
    check_unwritten(study / JOURNAL)


def _of_ensemble(ensemble: Ensemble, path: Path, digest: str) -> AssetMade:
    return AssetMade(
        form="ensemble",
        method=ensemble.method,
        members=[AssetMember(member.trial, member.weight) for member in ensemble.members],
        data=ensemble.data,
        objective=ensemble.objective,
        direction=ensemble.direction,
        score=ensemble.score,
        test=None if ensemble.test is None else ensemble.test.ensemble,
        parameters=sum(member.parameters for member in ensemble.members),
        singles=[SingleScore(single.trial, single.score, single.parameters) for single in ensemble.singles],
        file=str(path),
        sha256=digest,
    )


def _of_soup(result: StudySoup, path: Path, digest: str) -> AssetMade:
    soup = result.soup
    return AssetMade(
        form="soup",
        method=result.how,
        members=[AssetMember(trial, 1 / len(soup.trials)) for trial in soup.trials],
        data=result.data,
        objective=result.objective,
        direction=result.direction,
        score=soup.score,
        test=None if result.test is None else result.test.soup,
        parameters=result.parameters,
        singles=[SingleScore(single.trial, single.score, single.parameters) for single in result.singles],
        file=str(path),
        sha256=digest,
    )


def _of_composed(result: ComposedModel, path: Path, digest: str) -> AssetMade:
    """The record of a composed model. All its trials count as parts, also those of this study.

    Some of them may have begun with weights of other studies.
    """
    took = training_of_studies((source.study, source.trial) for source in result.source_trials)
    return AssetMade(
        form=result.form,
        method=result.method,
        members=[],
        data=result.data,
        objective=result.objective,
        direction=result.direction,
        score=result.score,
        test=None if result.test is None else result.test.model,
        parameters=result.parameters,
        singles=list(result.singles),
        file=str(path),
        sha256=digest,
        parts=[AssetPart(str(source.study), source.trial) for source in result.source_trials],
        parts_s=took.worker_seconds,
        unrecorded=list(took.unrecorded),
    )
