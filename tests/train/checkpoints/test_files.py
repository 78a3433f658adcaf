"""Files of pieces: written by several, read by others that want other pieces."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.layout import Box, FlatRange, whole_range
from elastune.core.run import Position
from elastune.parallel.mechanisms.tensor_storage import PartialTensor, elements, whole
from elastune.train.checkpoints.checkpoint import (
    Contribution,
    TensorStore,
    contribute,
    damaged,
    draft,
    load,
    load_newest,
    merged,
    publish,
)
from elastune.train.checkpoints.checkpoint_part import CheckpointPart, file_name, write

SHAPE = (6, 8)


def stretches_of(tensor_shape: tuple[int, ...], dim: int, blocks: int, parts: int) -> list[FlatRange]:
    """The shape cut into ``blocks`` boxes along ``dim``, each cut flat into ``parts`` stretches."""
    results = []
    for block in range(blocks):
        edges = [(0, size) for size in tensor_shape]
        edges[dim] = (tensor_shape[dim] * block // blocks, tensor_shape[dim] * (block + 1) // blocks)
        box: Box = tuple(edges)
        size = whole_range([b - a for a, b in box]).size
        cuts = [size * part // parts for part in range(parts + 1)]
        results += [FlatRange(box, a, b) for a, b in itertools.pairwise(cuts)]
    return results


def scattered(tensor: torch.Tensor, own: list[FlatRange]) -> PartialTensor:
    return PartialTensor("w", SHAPE, tensor.dtype, tuple((p, elements(tensor, p)) for p in own))


cuttings = st.tuples(st.sampled_from([0, 1]), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(st.none() | cuttings, cuttings, st.integers(1, 4))
def test_any_cut_is_read_from_any_other(
    written: tuple[int, int, int] | None, wanted: tuple[int, int, int], writers: int
) -> None:
    tensor = torch.randn(SHAPE)
    with tempfile.TemporaryDirectory() as place:
        folder, names = Path(place), [file_name(i, writers) for i in range(writers)]
        if written is None:
            results = [write(folder, names[0], {"w": tensor})]
        else:
            pieces = stretches_of(SHAPE, *written)
            results = [
                write(
                    folder,
                    name,
                    {"w": PartialTensor("w", SHAPE, tensor.dtype, tuple((p, elements(tensor, p)) for p in own))},
                )
                for name, own in ((name, pieces[i::writers]) for i, name in enumerate(names))
            ]
        shelf = TensorStore(folder, [each.name for each in results], merged([each.index for each in results]))
        assert torch.equal(whole(shelf["w"]), tensor)
        for stretch in stretches_of(SHAPE, *wanted):
            assert torch.equal(shelf["w"].read(stretch), elements(tensor, stretch))


def test_what_is_missing_or_there_twice_is_no_checkpoint() -> None:
    entry = {"dtype": "float32", "shape": [4], "pieces": [["f", "w@0", [[0, 4]], 0, 3]]}
    with pytest.raises(ValueError, match="pieces of w"):
        merged([{"w": entry}])
    with pytest.raises(ValueError, match="pieces of w"):
        merged([{"w": entry}, {"w": {**entry, "pieces": [["g", "w@0", [[0, 4]], 2, 4]]}}])
    with pytest.raises(ValueError, match="float64"):
        merged([{"w": entry}, {"w": {**entry, "dtype": "float64"}}])


def shares_of_three(at: Path, step: int) -> list[Contribution]:
    """Three writers' shares of a vector that tells its step; the scalar is written by the last one."""
    vector = torch.arange(10.0) + step
    results = []
    for i, stretch in enumerate(stretches_of((10,), 0, 1, 3)):
        pieces = ((stretch, elements(vector, stretch)),)
        scattered = [PartialTensor(name, (10,), torch.float32, pieces) for name in ("w", "w:m")]
        model = {"w": scattered[0], "tied": scattered[0]}
        states = {"model": model, "optimizer": {"state": {"w": {"m": scattered[1]}}}}
        if i == 0:
            states |= {"progress": {"seconds": 1.0}}
        if i == 2:
            states["optimizer"]["state"]["w"]["step"] = torch.tensor(float(step))  # type: ignore[assignment]
        results.append(Contribution.of(json.loads(json.dumps(contribute(at, CheckpointPart.of(states), i, 3).tree))))
    return results


def published(folder: Path, step: int) -> Path:
    at = draft(folder, "here")
    return publish(at, Position(step=step), {"seed": 1}, shares_of_three(at, step))


def test_shares_become_one_checkpoint(tmp_path: Path) -> None:
    path = published(tmp_path, 3)
    assert sorted(file.name for file in path.iterdir()) == ["state.json", *(file_name(i, 3) for i in range(3))]
    loaded = load(path)
    assert torch.equal(loaded.states["model"]["w"], torch.arange(10.0) + 3)
    assert torch.equal(loaded.states["model"]["tied"], torch.arange(10.0) + 3)
    assert loaded.states["optimizer"]["state"]["w"]["step"] == 3
    late = load(path, whole_parts=False).states["optimizer"]["state"]["w"]["m"]
    assert torch.equal(late.read(FlatRange(((0, 10),), 2, 9)), torch.arange(2.0, 9.0) + 3)


@pytest.mark.parametrize("which", range(3))
def test_a_damaged_file_of_one_writer_is_named_and_the_one_before_is_used(tmp_path: Path, which: int) -> None:
    published(tmp_path, 3)
    file = published(tmp_path, 4) / file_name(which, 3)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ((step, why),) = damaged(tmp_path).items()
    assert step == 4
    assert file.name in why
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest[1].position.step == 3


def test_a_folder_that_not_all_writers_share_is_told(tmp_path: Path) -> None:
    at = draft(tmp_path, "here")
    shares = shares_of_three(at, 3)
    (at / shares[1].file.name).unlink()
    with pytest.raises(UserError, match="all workers write their part of a checkpoint into one folder"):
        publish(at, Position(step=3), {}, shares)
    assert not list(tmp_path.iterdir())
