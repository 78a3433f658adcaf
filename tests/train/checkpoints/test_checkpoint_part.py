"""A copy in host memory, the file that it becomes, and the thread that writes it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.errors import UserError
from elastune.core.layout import FlatRange
from elastune.core.run import Position
from elastune.parallel.mechanisms.tensor_storage import PartialTensor
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.background import PendingCheckpoint, Published
from elastune.train.checkpoints.checkpoint import NoRoom, complete, contribute, draft, publish, step_of
from elastune.train.checkpoints.checkpoint_part import NAMES, CheckpointPart, HostBuffers, write
from elastune.train.checkpoints.spool import digest_of


def states(value: float) -> dict[str, object]:
    partial = PartialTensor("p", (4,), torch.float32, ((FlatRange(((0, 4),), 1, 3), torch.full((2,), value)),))
    return {"model": {"w": torch.full((3, 2), value), "p": partial, "n": torch.tensor(int(value))}}


def tensors_of(part: CheckpointPart) -> list[torch.Tensor]:
    whole, partial, number = part.tensors.values()
    assert isinstance(whole, torch.Tensor)
    assert isinstance(number, torch.Tensor)
    assert isinstance(partial, PartialTensor)
    return [whole, number, *(values for _, values in partial.pieces)]


def test_a_copy_stays_as_it_was_and_its_memory_is_used_again() -> None:
    buffers, source = HostBuffers(), states(1.0)
    first = buffers.copy(CheckpointPart.of(source))
    assert first.nbytes == 24 + 8 + 8
    places = [each.data_ptr() for each in tensors_of(first)]
    source["model"]["w"].zero_()  # type: ignore[index]
    assert [float(each.sum()) for each in tensors_of(first)] == [6.0, 1.0, 2.0]
    second = buffers.copy(CheckpointPart.of(states(2.0)))
    assert [each.data_ptr() for each in tensors_of(second)] == places
    assert [float(each.sum()) for each in tensors_of(second)] == [12.0, 2.0, 4.0]


def test_other_shapes_and_types_get_memory_of_their_own() -> None:
    buffers = HostBuffers()
    buffers.copy(CheckpointPart.of({"model": {"w": torch.ones(4), "gone": torch.ones(9)}}))
    part = buffers.copy(CheckpointPart.of({"model": {"w": torch.ones(2, dtype=torch.float64)}}))
    assert torch.equal(part.tensors["state.model.w"], torch.ones(2, dtype=torch.float64))  # type: ignore[arg-type]
    assert list(buffers._buffers) == ["state.model.w"], "the memory of what is gone is given back"


@pytest.mark.parametrize("dtype", NAMES)
def test_every_type_comes_back_from_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """Beside a tensor of one byte, which must not move it to a place that its type cannot begin at."""
    values = torch.arange(6).reshape(2, 3).to(dtype)
    tensors = {"a": torch.ones(1, dtype=torch.bool), "b": values, "c": torch.zeros(0, 3), "d": values[0, 1]}
    written = write(tmp_path, "f.safetensors", tensors)
    assert (written.size, written.sha256) == (
        (tmp_path / "f.safetensors").stat().st_size,
        digest_of(tmp_path / "f.safetensors"),
    )
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert file.get_slice("b")[1:2].shape == (1, 3)


def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError, match="complex128"):
        write(tmp_path, "f.safetensors", {"w": torch.zeros(1, dtype=torch.complex128)})


def test_a_disk_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "free_bytes", lambda folder: 39)
    at = draft(tmp_path, "1")
    with pytest.raises(NoRoom, match="40 B needed, 39 B free"):
        contribute(at, CheckpointPart.of(states(1.0)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(checkpoints, "free_bytes", lambda folder: 40)
    contribute(at, CheckpointPart.of(states(1.0)))


def test_the_best_by_a_metric_stays(tmp_path: Path) -> None:
    keep = KeepCheckpoints.parse("last:1,best:accuracy")
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.2)):
        at = draft(tmp_path, str(step))
        share = contribute(at, CheckpointPart.of({"model": {}, "progress": {"metrics": {"accuracy": accuracy}}}))
        publish(at, Position(step=step), {}, [share], keep)
    assert [step_of(path) for path in complete(tmp_path)] == [2, 4]
    (complete(tmp_path)[0] / "state.json").write_text("{")  # damaged: it has no metric any more
    at = draft(tmp_path, "5")
    share = contribute(at, CheckpointPart.of({"model": {}, "progress": {"metrics": {"accuracy": 0.1}}}))
    publish(at, Position(step=5), {}, [share], keep)
    assert [step_of(path) for path in complete(tmp_path)] == [4, 5]


def test_a_thread_publishes_once_all_parts_are_there(tmp_path: Path) -> None:
    parts: list[int] = []
    done = Published(tmp_path)
    pending = PendingCheckpoint(3, tmp_path, lambda: parts.append(0), lambda: done if len(parts) == 2 else None)
    pending.wait_written()
    assert (parts, pending.done, pending.published) == ([0], False, None)
    parts.append(1)
    pending.wait(20.0)
    assert (pending.done, pending.published, pending.error) == (True, done, None)


def test_a_thread_gives_up_on_parts_that_will_not_come(tmp_path: Path) -> None:
    looks: list[int] = []
    pending = PendingCheckpoint(3, tmp_path, lambda: None, lambda: looks.append(1))  # type: ignore[func-returns-value]
    pending.conclude()
    assert (pending.done, pending.published, pending.error) == (True, None, None)
    assert looks


def test_an_error_of_the_thread_is_kept_for_the_main_one(tmp_path: Path) -> None:
    began, error = threading.Event(), UserError("rule", "value", "fix")

    def write_() -> None:
        began.wait()
        raise error

    pending = PendingCheckpoint(3, tmp_path, write_, None)
    assert not pending.done
    began.set()
    pending.wait_written()
    pending.conclude()
    assert pending.error is error
