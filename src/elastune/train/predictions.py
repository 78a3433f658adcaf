"""Predictions of a model on data that training never uses: gathered in the samples' order, kept as one file.

The number of workers does not show in the file: its bytes follow from the samples' order alone. Ensembles are chosen
by such files (``elastune.tuning.reuse``), long after the models are gone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from elastune.core.errors import Diverged, UserError
from elastune.core.journal.files import atomic_write
from elastune.core.journal.records import PredictionsKept
from elastune.elastic.worker.group import WorkerGroup
from elastune.train.checkpoints.out_folder import OutFolder

FOLDER = "predictions"
HELD_OUT = "test"
"""The beginning of names of data that no choice may rest on."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
LARGEST_BYTES = 1 << 30
ENDING = ".safetensors"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass
class EvaluatedSamples:
    """The samples that this worker's newest evaluation has given to the program.

    Attributes:
        length: Samples in the data set; 0 for a stream that has not ended.
        batches: The samples' places in the data set, batch by batch.
    """

    length: int = 0
    batches: list[list[int]] = field(default_factory=list)

    def begin(self, length: int) -> None:
        """A new evaluation begins."""
        self.length, self.batches = length, []

    def came_to(self, length: int) -> None:
        """The stream has ended after ``length`` samples."""
        self.length = length

    @property
    def places(self) -> list[int]:
        """The samples' places in the data set, in the order in which the program got them."""
        return [place for batch in self.batches for place in batch]


def check_name(name: str) -> None:
    """Raise ``UserError`` where ``name`` cannot name predictions, and so a file."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        rule = "predictions have a name of small letters, digits and _, at most 40"
        raise UserError(rule, repr(name)[:60], 'such as "validation" or "test"')


def own_part(seen: EvaluatedSamples, outputs: object, targets: object) -> bytes:
    """This worker's rows as bytes, for the other workers.

    Args:
        seen: The samples of the newest evaluation.
        outputs: A tensor, or one for each batch of it.
        targets: In the same form.

    Raises:
        UserError: Where rows are missing or cannot be kept.
    """
    places = seen.places
    rows = {"outputs": _joined(outputs, "outputs"), "targets": _joined(targets, "targets")}
    for what, tensor in rows.items():
        if len(tensor) != len(places):
            rule = f"{what} are those of the newest session.batches(..., train=False), a row a sample"
            fix = "collect them in that loop, and call session.predictions behind it"
            raise UserError(rule, f"{len(tensor)} rows of {len(places)} samples", fix)
    return save({**rows, "places": torch.tensor(places, dtype=torch.int64)}, {"length": str(seen.length)})


def in_order(parts: Sequence[bytes], length: int) -> dict[str, torch.Tensor]:
    """``outputs`` and ``targets`` of all ``length`` samples from the workers' ``parts``, in the samples' order.

    Raises:
        Diverged: Where an output is not finite.
        UserError: Where the parts are not every sample once, do not fit together, or a target is not finite.
    """
    loaded = [part for part in map(load, parts) if len(part["places"])]
    places = torch.cat([part["places"] for part in loaded]) if loaded else torch.empty(0, dtype=torch.int64)
    if length < 1 or not torch.equal(places.sort().values, torch.arange(length)):
        fix = "go through all batches of session.batches(data, ..., train=False) before it"
        raise UserError("predictions are of every sample of an evaluation", f"{len(places)} of {length}", fix)
    order, whole = places.argsort(), {}
    for what in ("outputs", "targets"):
        kinds = {(part[what].dtype, part[what].shape[1:]) for part in loaded}
        if len(kinds) > 1:
            raise UserError(f"{what} have one shape and type for all samples", sorted(map(str, kinds)), "stack them so")
        whole[what] = torch.cat([part[what] for part in loaded])[order].contiguous()
    return _finite(whole)


def complete_rows(outputs: object, targets: object) -> dict[str, torch.Tensor]:
    """``outputs`` and ``targets`` that one process has of all samples, in their order. Raises as ``in_order``."""
    whole = {"outputs": _joined(outputs, "outputs"), "targets": _joined(targets, "targets")}
    counts = [len(tensor) for tensor in whole.values()]
    if not counts[0] or counts[0] != counts[1]:
        rule = "outputs and targets have a row for each sample, and there is one"
        raise UserError(rule, f"{counts[0]} and {counts[1]} rows", "give as many of both")
    return _finite(whole)


def _finite(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not torch.isfinite(whole["outputs"]).all():
        raise Diverged("the model's outputs are not finite")
    if not torch.isfinite(whole["targets"]).all():
        fix = "leave out samples whose target is missing"
        raise UserError("targets are finite numbers", "some that are not", fix)
    return whole


def keep(out: Path, home: OutFolder, name: str, whole: dict[str, torch.Tensor], step: int) -> PredictionsKept:
    """Write the file of predictions ``name`` of the run in ``out``, whole or not at all.

    Raises ``UserError`` where they are too many, or cannot be written.
    """
    content = save(whole)
    if len(content) > LARGEST_BYTES:
        value = f"{name}: {len(content) >> 20} MiB"
        raise UserError(f"predictions have at most {LARGEST_BYTES >> 20} MiB", value, "take fewer samples")
    path = file_of(out, name)
    try:
        home.make(path.parent)
        atomic_write(path, content)
    except OSError as error:
        raise UserError("predictions must be writable", error, f"free space at {out}") from None
    digest = hashlib.sha256(content).hexdigest()
    return PredictionsKept(name, step, len(whole["targets"]), len(content), digest)


def meet_and_keep(
    workers: WorkerGroup, rows: Sequence[bytes], length: int, out: Path, home: OutFolder, name: str, step: int
) -> PredictionsKept | None:
    """Write the predictions of all workers' ``rows``. A lost worker does not stop it: the rank 0 of then writes them.

    Returns:
        The record for the journal, on the worker that wrote the file; else None.
    """
    whole = in_order(rows, length)
    record: PredictionsKept | None = None
    while True:
        if workers.rank == 0 and record is None:
            record = keep(out, home, name, whole, step)
        if not workers.elastic or workers.size == 1:
            return record
        if any(written for (written,) in workers.gather([float(record is not None)], f"predictions {name}")):
            return record


def file_of(run: Path, name: str) -> Path:
    """The path of the predictions ``name`` of the run in ``run``."""
    return run / FOLDER / f"{name}{ENDING}"


def kept_in(run: Path) -> dict[str, str]:
    """The SHA-256 of all predictions of the run in ``run``, by their names."""
    digests = {}
    for path in sorted((run / FOLDER).glob(f"*{ENDING}")):
        if path.is_file() and NAME.fullmatch(path.stem):
            digests[path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def read_predictions(path: Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Read ``outputs`` and ``targets`` from the file at ``path``.

    Args:
        path: A file that ``keep`` wrote.
        sha256: The digest that a journal has of it; None: any.

    Raises:
        UserError: For a file that ``keep`` did not write, or that was changed since.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no file")
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"it has more than {LARGEST_BYTES >> 20} MiB")
        content = path.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError("its digest is not that of the journal")
        tensors = load(content)
        if set(tensors) != {"outputs", "targets"}:
            raise ValueError(f"it holds {', '.join(sorted(tensors)) or 'nothing'}"[:200])
        outputs, targets = tensors["outputs"], tensors["targets"]
        if not len(targets) or len(outputs) != len(targets):
            raise ValueError(f"{len(outputs)} outputs for {len(targets)} targets")
        if outputs.dtype not in FLOATS or not torch.isfinite(outputs).all():
            raise ValueError("outputs that are no finite numbers")
        if targets.dtype not in (*FLOATS, *INTEGERS) or not torch.isfinite(targets).all():
            raise ValueError("targets that are no finite numbers")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        rule = "predictions must be a file that elastune has written"
        fix = "train the trial again, or elastune predict --again"
        raise UserError(rule, f"{path}: {str(error)[:200]}", fix) from None
    return tensors


def _joined(values: object, what: str) -> torch.Tensor:
    """The program's tensor, or list of tensors, as one tensor; rows are samples."""
    parts = [values] if isinstance(values, torch.Tensor) else list(values) if isinstance(values, Iterable) else [values]
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.ndim > 0]
    if len(tensors) < len(parts):
        rule = f"{what} are a tensor, or a list of one a batch; rows are samples"
        raise UserError(rule, f"{len(parts) - len(tensors)} that are none", "give model(x)")
    if not parts:  # a worker that had no batch
        return torch.empty(0)
    rows = torch.cat([tensor.detach().to("cpu") for tensor in tensors])
    if what == "outputs" and rows.dtype not in FLOATS:
        raise UserError("outputs are floating-point numbers", rows.dtype, "give logits, probabilities or values")
    if rows.dtype not in (*FLOATS, *INTEGERS):
        raise UserError("targets are classes or numbers", rows.dtype, "make them int64 or float32")
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows.contiguous()
