from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.wire.messages import Welcome, WorkerSpec, decode, encode
from elastune.elastic.wire.transport import Lines, ProtocolError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
configs = st.dictionaries(st.text(), st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5))


@given(configs, st.integers(), st.booleans())
def test_an_order_survives_the_wire(config: dict, seed: int, resume: bool) -> None:
    mesh = Mesh(data=2, tensor=2)
    execution = ExecutionSettings(workers=4, mode="fast", micro_batch=7, mesh=mesh, copies=2, schedule="gpipe")
    program = Program(Path("a b/é.py"), "fit", arguments=("--lr", "0.1", "a b"))
    spec = RunSpec(program, Path("/o"), config, seed, execution, epochs=2, resume=resume)
    order = WorkerSpec("m:f", spec, Place(1, 3, 1, "cuda:1", False, "file:///x"), {"A": "1\n"}, "/", ["", "/x"])
    line = encode(Welcome(False, 0.5, spec=order))
    assert line.count(b"\n") == 1
    assert decode(line[:-1]).spec == order


def test_numbers_keep_their_type_and_nan_its_meaning() -> None:
    spec = RunSpec(Program(Path("p")), Path("o"), {"lr": 1.0, "n": 1, "on": True, "bad": math.nan})
    config = decode(encode(Welcome(False, 0.5, spec=WorkerSpec("m:f", spec, Place(), {}, "/", [])))).spec.spec.config
    assert [type(value) for value in config.values()] == [float, int, bool, float]
    assert math.isnan(config["bad"])


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON"):
        spec = RunSpec(Program(Path("p")), Path("o"), {"a": {1}})
        encode(Welcome(False, 0.5, spec=WorkerSpec("m:f", spec, Place(), {}, "/", [])))


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line)), st.lists(st.integers(1, 30)))
def test_lines_do_not_depend_on_how_they_arrive(lines: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    reader, found, at = Lines(20), [], 0
    for size in [*sizes, len(stream) + 1]:
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == lines


@pytest.mark.parametrize("pieces", [[b"x" * 11], [b"x" * 10, b"x"], [b"ok\n" + b"x" * 11 + b"\n"]])
def test_a_line_over_the_limit_is_refused(pieces: list[bytes]) -> None:
    reader = Lines(10)
    with pytest.raises(ProtocolError, match="10 bytes"):
        for piece in pieces:
            reader.feed(piece)


def test_a_line_at_the_limit_is_not() -> None:
    assert Lines(10).feed(b"x" * 10 + b"\n") == [b"x" * 10]
