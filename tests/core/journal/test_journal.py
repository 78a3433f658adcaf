import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, _last_line, check_unwritten, read
from elastune.core.journal.records import (
    Entry,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    StudyFinished,
    TrialFinished,
    decode_entry,
    encode_entry,
)


def report(step: int) -> Reported:
    return Reported(epoch=0, step=step, samples=step * 32, seconds=0.5 * step, metrics={"accuracy": 0.9})


def python(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


WRITE_FOREVER = """
import sys, pathlib
from elastune.core.journal.records import Reported
from elastune.core.journal.files import JournalWriter
journal = JournalWriter(pathlib.Path(sys.argv[1]))
step = 0
while True:
    journal.write(Reported(0, step, step, 0.0, {"loss": 1.0}))
    step += 1
    if step == 20:
        print("ready", flush=True)
"""


def test_what_was_written_is_read(tmp_path):
    times = iter([10.0, 11.5])
    path = tmp_path / "new" / "journal.jsonl"
    with JournalWriter(path, wall=lambda: next(times)) as journal:
        journal.write(report(1))
        journal.write(TrialFinished(3, "infeasible", reason="NaN\nin the loss"), durable=True)
    assert read(path) == [
        Entry(10.0, report(1)),
        Entry(11.5, TrialFinished(3, "infeasible", reason="NaN\nin the loss")),
    ]
    assert [json.loads(line)["at"] for line in path.read_text().splitlines()] == [10.0, 11.5]


def test_a_second_opening_appends(tmp_path):
    path = tmp_path / "journal.jsonl"
    for step in range(3):
        with JournalWriter(path) as journal:
            journal.write(report(step))
    assert [entry.record.step for entry in read(path)] == [0, 1, 2]


@given(
    at=st.floats(0, 4e9),
    value=st.floats(allow_nan=False),
    text=st.text(max_size=40),
)
def test_an_entry_survives_its_line(at, value, text):
    entry = Entry(round(at, 6), TrialFinished(1, "complete", values={text: value}, reason=text))
    line = encode_entry(entry)
    assert b"\n" not in line
    assert decode_entry(line) == entry


def test_nan_survives_its_line():
    line = encode_entry(Entry(1.0, TrialFinished(1, "infeasible", metrics={"loss": math.nan})))
    assert math.isnan(decode_entry(line).record.metrics["loss"])


def test_a_reformatted_line_is_still_read():
    entry = Entry(1.5, StudyFinished("budget", 3.0))
    assert decode_entry(json.dumps(json.loads(encode_entry(entry)), indent=2).encode()) == entry


@given(st.binary(max_size=80))
def test_any_line_is_an_entry_or_a_value_error(line):
    with contextlib.suppress(ValueError):
        decode_entry(line)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_journal_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    with JournalWriter(path) as journal:
        ends = [0]
        for step in range(4):
            journal.write(report(step))
            ends.append(path.stat().st_size)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = sum(end <= cut for end in ends) - 1
    assert [entry.record.step for entry in read(path)] == list(range(whole))
    with JournalWriter(path) as journal:
        journal.write(report(99))
    assert [entry.record.step for entry in read(path)] == [*range(whole), 99]


@pytest.mark.parametrize("tail", [b"\x00" * 300, b"\x00" * 300 + b"\n", b'{"at":1.0,"kind":"repo\n', b'{"at":1.0'])
def test_a_tail_torn_by_a_power_cut_is_cut_off(tmp_path, tail):
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write(report(0))
    intact = path.read_bytes()
    path.write_bytes(intact + tail)
    assert len(read(path)) == 1
    JournalWriter(path).close()
    assert path.read_bytes() == intact


def test_a_very_long_torn_tail_is_cut_off(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write(report(0))
    intact = path.read_bytes()
    path.write_bytes(intact + b'{"at":1.0,"kind":"' + b"x" * 200_000)
    JournalWriter(path).close()
    assert path.read_bytes() == intact


@pytest.mark.parametrize(
    "content", [b"a", b"\n", b"a\n", b"a\nb", b"a\nbc\n", b"\n\n", b"abc\n\ndef\n", b"a\n" + b"b" * 40]
)
def test_the_last_line_is_found_whatever_the_blocks(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    start = content.rfind(b"\n", 0, len(content) - 1) + 1
    with (tmp_path / "file").open("rb") as file:
        for block in (1, 2, 3, 5, 64):
            assert _last_line(file.fileno(), len(content), block) == (start, content[start:])


def test_a_last_line_of_many_blocks_takes_no_longer_than_they_do(tmp_path):
    line = b"x" * (1 << 21)
    (tmp_path / "file").write_bytes(b"first\n" + line)
    with (tmp_path / "file").open("rb") as file:
        began = time.process_time()
        assert _last_line(file.fileno(), 6 + len(line), block=16) == (6, line)
    assert time.process_time() - began < 5, "a tenth of that; half a minute where each block copies all later ones"


def test_a_bad_line_of_megabytes_is_told_in_one_short_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    good = encode_entry(Entry(1.0, report(0)))
    path.write_bytes(b"\n".join([good, b'{"at":1.0,"kind":"\\u001b' + b"x" * 3_000_000 + b'"}', good, b""]))
    with pytest.raises(UserError, match="line 2") as error:
        read(path)
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


def test_reasons_are_written_and_read_without_what_a_terminal_obeys():
    failed = RunFailed("exception", "\x1b[2J\u202e", 0)
    assert failed.detail == "\\x1b[2J\\u202e"
    line = encode_entry(Entry(1.0, TrialFinished(0, "infeasible", reason="a\x07b")))
    assert b"a\\\\x07b" in line
    older = line.replace(b"a\\\\x07b", b"a\\u0007b")
    assert decode_entry(older).record == decode_entry(line).record


def test_a_whole_last_line_of_unknown_kind_is_not_cut_off(tmp_path):
    path = tmp_path / "journal.jsonl"
    text = b'{"at":1.0,"kind":"from_the_future"}\n'
    path.write_bytes(text)
    JournalWriter(path).close()
    assert path.read_bytes() == text
    with pytest.raises(UserError, match="line 1"):
        read(path)


@pytest.mark.parametrize("text", [b"my only copy of the thesis", b"[1, 2]\n", b"{}"])
def test_a_foreign_file_is_refused_untouched(tmp_path, text):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match="records"):
        JournalWriter(path)
    assert path.read_bytes() == text


def test_a_corrupt_middle_line_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        for step in range(3):
            journal.write(report(step))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"reported", b"rep\xffrted") + lines[2])
    with pytest.raises(UserError, match="line 2") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ["2", '"1"', "[]"])
def test_a_journal_of_another_format_is_refused_with_its_number(tmp_path: Path, written: str) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write(RunStarted("train.py", {}, 0, {}))
    path.write_text(path.read_text().replace('"format":1', f'"format":{written}'))
    refusal = r"this release reads journals of format 1 \(got .*: format \S+\): use the release"
    with pytest.raises(UserError, match=refusal):
        read(path)


def test_a_missing_journal_and_a_folder_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="must exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="must be a file"):
        read(tmp_path)
    with pytest.raises(UserError, match="writable"):
        JournalWriter(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="writable"):
        JournalWriter(tmp_path / "file" / "journal.jsonl")


def test_a_second_writer_is_refused_and_reading_does_not_free_the_lock(tmp_path):
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write(report(0))
        read(path)
        with pytest.raises(UserError, match=f"pid {os.getpid()}"):
            JournalWriter(path)
        with pytest.raises(UserError, match=f"pid {os.getpid()}"):
            check_unwritten(path)
        other = python(WRITE_FOREVER, str(path))
        _, error = other.communicate(timeout=60)
        assert f"held by pid {os.getpid()}" in error
    check_unwritten(path)
    JournalWriter(path).close()
    check_unwritten(tmp_path / "nowhere" / "journal.jsonl")
    assert not (tmp_path / "nowhere").exists()


def test_kill_minus_9_frees_the_lock_and_leaves_whole_records(tmp_path):
    path = tmp_path / "journal.jsonl"
    writer = python(WRITE_FOREVER, str(path))
    assert writer.stdout.readline() == "ready\n"
    for takes in (JournalWriter, check_unwritten):
        with pytest.raises(UserError, match=f"pid {writer.pid}"):
            takes(path)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    with JournalWriter(path) as journal:
        journal.write(StudyFinished("resumed", 0.0))
    *steps, last = [entry.record for entry in read(path)]
    assert [record.step for record in steps] == list(range(len(steps)))
    assert len(steps) >= 20
    assert last.kind == "study_finished"


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "journal.jsonl"
    code = WRITE_FOREVER.replace("step = 0\n", "import os, time\nif os.fork() == 0:\n    time.sleep(30)\nstep = 0\n", 1)
    code = code.replace("if os.fork() == 0:", "child = os.fork()\nif child:\n    print(child, flush=True)\nelse:")
    writer = python(code, str(path))
    child = int(writer.stdout.readline())
    assert writer.stdout.readline() == "ready\n"
    writer.kill()
    writer.wait()
    JournalWriter(path).close()
    os.kill(child, signal.SIGKILL)
    writer.communicate()


def test_a_full_disk_is_a_user_error_and_keeps_whole_lines(tmp_path):
    code = """
import pathlib, resource, sys
from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.core.journal.files import JournalWriter
journal = JournalWriter(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(100):
        journal.write(Reported(0, step, step, 0.0, {"loss": 1.0}))
except UserError as error:
    print(error)
journal.close()
"""
    path = tmp_path / "journal.jsonl"
    out, error = python(code, str(path)).communicate(timeout=60)
    assert "a journal needs room on its disk" in out, error
    assert 500 < path.stat().st_size <= 1000
    entries = read(path)
    assert path.read_bytes() == b"".join(encode_entry(entry) + b"\n" for entry in entries)


def test_a_closed_writer_says_so(tmp_path):
    journal = JournalWriter(tmp_path / "journal.jsonl")
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.write(report(0))


def test_a_run_record_keeps_its_type(tmp_path):
    path = tmp_path / "journal.jsonl"
    run = RunFinished("ab", 2, 10, 320, 1.5, {"accuracy": 0.9}, stopped="max_steps")
    with JournalWriter(path) as journal:
        journal.write(TrialFinished(0, "complete", run=run))
    assert read(path)[0].record.run == run


def test_the_disk_is_waited_for_but_not_at_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now = [100.0]
    monkeypatch.setattr("elastune.core.journal.files.os.fsync", lambda file: synced.append(len(path.read_bytes())))
    monkeypatch.setattr("elastune.core.journal.files.time.monotonic", lambda: now[0])
    path = tmp_path / "journal.jsonl"
    journal = JournalWriter(path)
    journal.write(TrialFinished(0, "complete"))
    assert synced == []
    journal.write(TrialFinished(1, "complete"), durable=True)
    assert synced == [path.stat().st_size]
    journal.write(TrialFinished(2, "complete"), durable=True)
    journal.settle()
    assert len(synced) == 1, "too soon after the last"
    now[0] += 1.0
    journal.settle()
    journal.settle()
    assert synced[1:] == [path.stat().st_size]
    journal.write(TrialFinished(3, "complete"), durable=True)
    journal.close()
    assert synced[-1] == path.stat().st_size


def test_half_a_surrogate_pair_costs_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write(RunFailed("exception", "\ud800", 0, log="exception: \ud800 and \u00e9 and \U0001f600\u2028"))
    (entry,) = read(path)
    assert entry.record.log == "exception: ? and \u00e9 and \U0001f600\u2028"
    assert entry.record.detail == "\\ud800"
