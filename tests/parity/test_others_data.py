"""Hugging Face's data sets and WebDataset's tar files in ``session.batches``: no sample twice, none lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parity.programs import others_data
from tests.support.elastic_runs import SLOTS, Runs
from tests.support.sessions import lone_session

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster

CUT = r"all its parts \(got \S*shard-2.tar: sample 0021 has id, and no cls\)"
PROGRAM = Program(Path(__file__).parent / "programs" / "others_data.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    others_data.write_tars(tmp_path)
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["map", "stream", "tars"])
def test_each_sample_is_used_once_an_epoch_whoever_dies(cluster: LocalCluster, folder: Path, kind: str) -> None:
    seen: list[list[int]] = []
    settings = {"kind": kind, "folder": str(folder)}
    session = lone_session(
        folder / "alone",
        execution=ExecutionSettings(num_slots=SLOTS),
        seed=3,
        config={**settings, "seen": seen, "faults": []},
    )
    others_data.train(session)
    session.finish()
    ids = [number for batch in seen for number in batch]
    first, second = ids[: others_data.COUNT], ids[others_data.COUNT :]
    assert sorted(first) == sorted(second) == list(range(others_data.COUNT))
    assert first != second, "each epoch has an order of its own"
    assert session.trained is not None
    ran = Runs(cluster, folder, PROGRAM)(3, **settings, faults=["kill 1 2 after", "kill 0 6 before"])
    assert ran.lost == [1, 0]
    assert ran.ledger.exact
    assert ran.sha256 == session.trained.fingerprint(session.state.workers)


@pytest.mark.parametrize(
    ("left", "kind", "message"),
    [
        (3 * 1024 + 512, "mapped", r"a tar file of a stream is whole \(got \S*shard-2.tar: unexpected end of data"),
        *((3 * 1024, kind, CUT) for kind in ("mapped", "collated", "tuples")),
    ],
)
def test_a_tar_file_that_was_cut_is_named(folder: Path, left: int, kind: str, message: str) -> None:
    file = folder / "shard-2.tar"
    file.write_bytes(file.read_bytes()[:left])
    session = lone_session(folder / "alone", config={"kind": "tars", "folder": str(folder), "faults": []})
    raw = others_data.raw_tars(str(folder))
    opened = {"mapped": others_data.tars(str(folder)), "collated": raw, "tuples": raw.to_tuple("id", "cls")}[kind]
    with pytest.raises(UserError, match=message):
        for _ in session.batches(opened, 16, train=False):
            pass
