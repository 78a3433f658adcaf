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
from elastune.core.journal.records import AssetMade, AssetMember, AssetPart, SingleScore
from elastune.core.journal.spending import training_of_studies
from elastune.runtime.job.output import JOURNAL
from elastune.tune.reuse.class_tree import class_tree
from elastune.tune.reuse.composed_models import Composed, ComposedModel, JoinedModel, StackedParts, View, whole_input
from elastune.tune.reuse.ensemble import Ensemble, EnsembleModel
from elastune.tune.reuse.kept_models import Build, built, check_file, fill, library, tensors_of, weights_of
from elastune.tune.reuse.predictions import LARGEST_BYTES, Task
from elastune.tune.reuse.soup import StudySoup

# [model file] A model as one file that carries its own digest: safetensors with JSON in the header. Reading runs none of it.
#
# The header has the SHA-256 of the whole file, taken with zeros in the digest's place. A changed byte, a cut and an
# addition are all found before anything is parsed. A digest finds damage, not malice: whoever may write the file may
# write another digest. So the content is checked as well.

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
        path: The file; one that is there is replaced.
        content: What the header tells: JSON values.
        tensors: By their names; no two share memory.

    Raises:
        UserError: Where the file cannot be written, or a tensor holds what is no number.
    """
    unfit = not_numbers(tensors)
    if unfit is not None:
        raise UserError("a model that is written has numbers as weights", f"NaN in {unfit}", "leave that trial out")
    metadata = {KEY: json.dumps(content), DIGEST: _ZEROS.decode()}
    unsealed = save({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, metadata)
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
        UserError: For any other file, and one that has changed since it was written.
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
    """Return the name of the first tensor that has a NaN. Infinities may be meant, as in a mask of attention."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and math.isnan(float(tensor.sum())) and bool(tensor.isnan().any()):
            return name
    return None


def _check_digest(path: Path, what: str) -> None:
    """Raise ``ValueError`` where the file does not have the digest that it carries."""
    with path.open("rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > min(_LONGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"it is not {what}")
        header = file.read(size)
        carried = _SEALED.findall(header)
        if len(carried) != 1:  # in the description's JSON its quotation marks are escaped
            raise ValueError(f"it is not {what}, or it was damaged since")
        digest = hashlib.sha256(length + header.replace(carried[0], _ZEROS, 1))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest().encode() != carried[0]:
        raise ValueError("its bytes do not have the digest that it was written with")


# [ensemble file] An ensemble as one file: safetensors with JSON in the header. Reading it runs none of its content.

ENSEMBLE_FORMAT = 2
MOST_MEMBERS = 1000
WIDEST = LARGEST_BYTES // 8
"""Numbers that one sample can have: more predictions than that were never judged."""
_ENSEMBLE = "an ensemble"
_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class FileMember:
    """One model in the file; the names of its tensors begin with its place."""

    trial: int
    weight: Annotated[float, Field(gt=0, le=1)]
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class FileContent:
    """The content of the header."""

    format: Literal[2]
    kind: Literal["classification", "regression"]
    says: Literal["logits", "probabilities", "values"]
    width: Annotated[int, Field(ge=1, le=WIDEST)]
    members: Annotated[list[FileMember], Field(min_length=1, max_length=MOST_MEMBERS)]
    about: dict[str, Any]

    @property
    def task(self) -> Task:
        """The kind of problem."""
        return Task(self.kind, self.says, self.width)


def save_ensemble(found: Ensemble, file: str | Path) -> Path:
    """Write the weights and the description of an ensemble as one file; it appears whole or not at all.

    Args:
        found: An ensemble from ``ensemble``; the folder of its study must be unchanged.
        file: The path; a file that is there is replaced.

    Returns:
        The path.

    Raises:
        UserError: Where weights are gone or damaged or NaN, or the file cannot be written.

    Example:
        >>> elastune.save_ensemble(elastune.ensemble("out", members=8), "ensemble.safetensors")
    """
    path = Path(file)
    check_file(path)
    known = {one.trial: one for one in library(found.study).candidates}
    tensors: dict[str, torch.Tensor] = {}
    for place, member in enumerate(found.members):
        if member.trial not in known:
            rule = "the weights of all members stay where they are until the ensemble is written"
            raise UserError(rule, f"trial {member.trial} of {found.study}", "choose anew")
        tensors |= {f"{place}.{name}": tensor for name, tensor in weights_of(known[member.trial]).items()}
    content = {
        "format": ENSEMBLE_FORMAT,
        "kind": found.task.kind,
        "says": found.task.says,
        "width": found.task.width,
        "members": [{"trial": m.trial, "weight": m.weight, "config": m.config} for m in found.members],
        "about": {
            "study": found.study.name,
            "method": found.method,
            "objective": found.objective,
            "data": found.data,
            "score": found.score,
            "test": None if found.test is None else found.test.ensemble,
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
        own = f"{place}."
        fill(model, {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}, f"in {path}")
        models.append(model)
    return EnsembleModel(models, [member.weight for member in content.members], content.task).eval()


def _check(path: Path, content: FileContent, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ``UserError`` where parts of the file contradict each other."""
    total = sum(member.weight for member in content.members)
    places = {str(place) for place in range(len(content.members))}
    stray = next((name for name in tensors if name.partition(".")[0] not in places), None)
    if not math.isclose(total, 1, abs_tol=1e-6):
        why = f"its weights add up to {total:g}"
    elif (content.kind == "regression") != (content.says == "values"):
        why = f"{content.says} of a {content.kind}"
    elif stray is not None:
        why = f"{stray} belongs to none of its {len(content.members)} members"
    else:
        return
    raise not_a_model_file(path, why, _ENSEMBLE)


# [composed file] A joined or stacked model as one file: safetensors with JSON in the header. Reading it runs none of its content.

COMPOSED_FORMAT = 2
_COMPOSED = "a joined or stacked model"
MOST_PARTS = 10_000


@dataclass(frozen=True, config=_RULES)
class FilePart:
    """One model in the file: its trial, its study, and its settings."""

    study: str
    trial: int
    config: dict[str, Any]


@dataclass(frozen=True, config=_RULES)
class ComposedContent:
    """The content of the header.

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
        model: The model, with its present weights.
        file: The path; a file that is there is replaced.

    Returns:
        The path.

    Raises:
        UserError: For a model that was built in another way, weights that are NaN, and where the file cannot be
            written.

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
            {"study": one.study.name, "trial": one.trial, "config": one.config} for one in model.source_trials[:parts]
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
        view: For a stacked model, what each part sees of the inputs, as for ``stacked_parts``.

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


# [record] Tell a study's journal what was made of its trials, so that reports and picks know of it.


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
    took = training_of_studies((one.study, one.trial) for one in found.source_trials)
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
        parts=[AssetPart(str(one.study), one.trial) for one in found.source_trials],
        parts_s=took.worker_seconds,
        untold=list(took.untold),
    )
