"""Files go to the controller and come from it: only under names they may have, only whole, whatever breaks half-way."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elastune.core.errors import UserError
from elastune.core.journal.records import Checkpointed, CheckpointFailed
from elastune.core.run import Position
from elastune.runtime.agents import transfer_client as mover
from elastune.runtime.agents import transfer_messages
from elastune.runtime.agents.transfer_client import FilesLink, FileTransferClient
from elastune.runtime.agents.transfer_messages import Ask, Contents, Fetch, FileTaken, Offer, Refused, SendFrom
from elastune.runtime.agents.transfer_server import UNKNOWN_RUN, CheckpointReceiver, FileTransferServer, IncompleteFile
from elastune.train.checkpoints.checkpoint import (
    STATE,
    Checkpoint,
    NoRoom,
    complete,
    contribute,
    load,
    of_step,
    save,
    sealed_state,
)
from elastune.train.checkpoints.checkpoint_part import CheckpointPart
from elastune.train.checkpoints.place import LocalStorage
from elastune.train.checkpoints.spool import CheckpointReply, CheckpointRequest, Spool, Ticket

TOKEN, RUN, LIMIT_S = "a token of this test", "ab" * 16, 20.0
DIGEST = hashlib.sha256(b"").hexdigest()


def states(scale: float = 1.0) -> dict[str, object]:
    return {"model": {"w": torch.arange(700_000, dtype=torch.float32) * scale}, "progress": {"at": 1}}


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Side:
    """A controller's folder and server, and the spool of one host."""

    def __init__(self, folder: Path) -> None:
        self.out, self.folder, self.told = folder / "out", folder, []
        self.server = FileTransferServer("127.0.0.1", TOKEN)
        self.mover: FileTransferClient | None = None

    def agent(self, *, opened: bool = True) -> Spool:
        if opened:
            self.server.open_run(RUN, self.out)
        self.mover = FileTransferClient(self.folder / "host", self.told.append)
        self.mover.use(f"127.0.0.1:{self.server.port}", TOKEN)
        self.mover.begin(RUN)
        return Spool(self.mover.spool_of(RUN))

    def link(self) -> FilesLink:
        return FilesLink(f"127.0.0.1:{self.server.port}", TOKEN)

    def write(self, spool: Spool, step: int = 3, view: int = 1) -> LocalStorage:
        near = LocalStorage(spool)
        at = near.draft(f"{step}-{view}-0")
        near.make_room(at, leads=True)
        share = contribute(at, CheckpointPart.of(states()))
        near.written(at, share.file)
        assert near.publish(at, Position(step=step), {"seed": 0}, [share]).path is None
        return near


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    own = Side(tmp_path)
    yield own
    if own.mover is not None:
        own.mover.close()
    own.server.close()


def ask(link: FilesLink, message: transfer_messages.FileRequest) -> transfer_messages.FileReply:
    link.send(message)
    return link.receive()


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["..", "../state.json", "a/state.json", "/state.json", "state.json\n", "state.json\0", "tensors-1-of-2.safetensors",
     "journal.jsonl", "", ".", "tensors.safetensors.partial", "tensors-00001-of-00002.safetensors/.."],
)  # fmt: skip
def test_no_file_goes_anywhere_else(name: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        Offer(RUN, ".draft-3-1-0", name, 1, DIGEST)
    with pytest.raises(ValueError, match="pattern"):
        Fetch(RUN, "own", 3, name, 0)
    with pytest.raises(ValueError, match="pattern"):
        Contents(3, {name: 1})


@pytest.mark.parametrize(
    "draft", ["..", ".draft-3-1-0/..", "step-0000000003", ".draft-", ".draft-3-1-0\n", ".draft-3-1", ".draft--3-1-0"]
)
def test_no_draft_is_anywhere_else(draft: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        Offer(RUN, draft, STATE, 1, DIGEST)
    with pytest.raises(ValueError, match="pattern"):
        Ticket("ab", draft, STATE, 1, DIGEST)


@pytest.mark.parametrize("size", [-1, (1 << 42) + 1])
def test_sizes_are_bounded(size: int) -> None:
    with pytest.raises(ValueError, match="than or equal"):
        Offer(RUN, ".draft-3-1-0", STATE, size, DIGEST)


def test_what_is_no_message_is_a_value_error() -> None:
    for line in (b"null", b"{}", b'{"kind":"offer"}', b'{"kind":"file_piece","content":1}', b"[" * 9999, b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
            transfer_messages.FROM_AGENT.decode(line)
    with pytest.raises(ValueError, match="no content"):
        transfer_messages.data_of(transfer_messages.FilePiece("=A"))
    said = [
        Offer(RUN, ".draft-3-1-0", STATE, 1, DIGEST),
        Ask(RUN, "own", before=3),
        transfer_messages.piece_of(b"\0\xff"),
    ]
    assert [
        transfer_messages.FROM_AGENT.decode(transfer_messages.FROM_AGENT.encode(message)[:-1]) for message in said
    ] == said


# -- the controller's folder ------------------------------------------------------------------------------------------


def offer(content: bytes, name: str = STATE, draft: str = ".draft-3-1-0", **other: object) -> Offer:
    return Offer(**{"run": RUN, "draft": draft, "name": name, "size": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(), **other})  # fmt: skip


def test_a_file_that_is_not_what_was_offered(tmp_path: Path) -> None:
    inbox = CheckpointReceiver(tmp_path)
    receiving = inbox.receive(offer(b"12345"))
    assert receiving is not None
    with pytest.raises(IncompleteFile, match="longer"):
        receiving.take(b"123456")
    receiving.take(b"1234X")
    with pytest.raises(IncompleteFile, match="digest"):
        inbox.accept(receiving)
    assert not receiving.at.exists()
    receiving.close()
    again = inbox.receive(offer(b"12345"))
    assert again is not None
    assert again.offset == 0
    again.take(b"12")
    again.close()
    rest = inbox.receive(offer(b"12345"))
    assert rest is not None
    assert rest.offset == 2


def test_a_state_that_names_files_elsewhere_completes_nothing(tmp_path: Path) -> None:
    """Its digest may be right: a host wrote it."""
    from elastune.train.checkpoints.spool import seal

    (tmp_path / "secret").write_bytes(b"")
    for tree in (
        {"files": {"../../secret": DIGEST}, "position": {"step": 3}},
        {"files": {}, "position": {"step": 4}},
        {"files": {"state.json": "x"}, "position": {"step": 3}},
        [],
    ):
        content, inbox = seal(tree), CheckpointReceiver(tmp_path)
        receiving = inbox.receive(offer(content))
        assert receiving is not None
        receiving.take(content)
        with pytest.raises(IncompleteFile):
            inbox.accept(receiving)
        assert complete(tmp_path / "checkpoints") == []
        assert inbox.receive(offer(content)) is None
        CheckpointReceiver(tmp_path).drop_drafts()


def test_a_checkpoint_is_one_when_all_of_it_is_there(tmp_path: Path) -> None:
    """In whatever order the parts come; drafts of steps before it go then."""
    inbox = CheckpointReceiver(tmp_path / "out")
    late = inbox.receive(offer(b"123", draft=".draft-2-1-0"))
    assert late is not None
    at = tmp_path / "near" / ".draft-3-1-0"
    parts = [contribute(at, CheckpointPart.of(states()), number, 2) for number in range(1)]
    content = sealed_state(Position(step=3), {}, parts)
    name = parts[0].file.name
    arrived = []
    for wanted, data in ((offer(content), content), (offer((at / name).read_bytes(), name), (at / name).read_bytes())):
        receiving = inbox.receive(wanted)
        assert receiving is not None
        assert complete(tmp_path / "out" / "checkpoints") == []
        receiving.take(data)
        arrived.append(inbox.accept(receiving))
    path = of_step(tmp_path / "out" / "checkpoints", 3)
    assert [found and (found.step, found.path) for found in arrived] == [None, (3, path)]
    assert torch.equal(load(path).states["model"]["w"], states()["model"]["w"])
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    late.take(b"123")
    assert inbox.accept(late) is None


def test_a_later_checkpoint_of_the_same_step_replaces_the_first(tmp_path: Path) -> None:
    """As at the end of an epoch, where one was written after its last step."""
    inbox, path = CheckpointReceiver(tmp_path), of_step(tmp_path / "checkpoints", 3)
    for draft, epoch in ((".draft-3-1-1", 1), (".draft-3-1-2", 2)):
        part = contribute(tmp_path / "near" / draft, CheckpointPart.of(states()))
        state, tensors = sealed_state(Position(step=3, epoch=epoch), {}, [part]), part.file.name
        for name, content in ((tensors, (tmp_path / "near" / draft / tensors).read_bytes()), (STATE, state)):
            receiving = inbox.receive(offer(content, name, draft))
            assert receiving is not None
            receiving.take(content)
            inbox.accept(receiving)
        assert load(path).position.epoch == epoch
    assert inbox.receive(offer(b"late", draft=".draft-3-1-0")) is None


# -- over a connection ------------------------------------------------------------------------------------------------


def test_what_a_host_writes_is_the_controllers_and_can_be_had_again(side: Side, tmp_path: Path) -> None:
    spool = side.agent()
    side.write(spool)
    until(lambda: complete(side.out / "checkpoints"))
    path = of_step(side.out / "checkpoints", 3)
    until(lambda: side.server.news() == [(RUN, Checkpointed(3, str(path)))])
    until(lambda: not side.mover.pending(RUN))
    assert not list((spool.at / "drafts").rglob("*.safetensors")), "what is with the controller stays on no host"
    near = LocalStorage(spool)
    found = near.load_newest(lambda path, files: "", lambda step: step)
    assert found is not None
    assert found[0].parent.is_relative_to(spool.at)
    assert torch.equal(load(found[0]).states["model"]["w"], states()["model"]["w"])
    with pytest.raises(UserError, match="no checkpoint after step 77"):
        spool.ask(CheckpointRequest("own", 77))
    assert near.newest_of_parent(tmp_path) == -1
    side.mover.leave(RUN)
    until(lambda: not spool.at.exists())


def test_a_damaged_checkpoint_is_passed_over_on_hosts_too(side: Side) -> None:
    for step in (3, 6):
        save(side.out / "checkpoints", Checkpoint(Position(step=step), {}, states(step)))
    (of_step(side.out / "checkpoints", 6) / "tensors.safetensors").write_bytes(b"rubbish")
    near = LocalStorage(side.agent())
    from elastune.train.checkpoints.checkpoint import faults

    found = near.load_newest(faults, lambda step: step)
    assert found is not None
    assert found[1].position.step == 3


def test_a_push_goes_on_where_its_connection_broke(side: Side) -> None:
    side.server.open_run(RUN, side.out)
    content = bytes(range(256)) * 4096
    whole = offer(content, "tensors.safetensors")
    first = side.link()
    assert ask(first, whole) == SendFrom(0)
    first.send(transfer_messages.piece_of(content[: transfer_messages.PIECE_BYTES]))
    partial = side.out / "checkpoints" / ".draft-3-1-0" / "tensors.safetensors.partial"
    until(lambda: partial.stat().st_size == transfer_messages.PIECE_BYTES)
    first.close()
    second, third = side.link(), side.link()
    assert ask(second, whole) == SendFrom(transfer_messages.PIECE_BYTES)
    assert ask(third, whole) == SendFrom(
        transfer_messages.PIECE_BYTES
    )  # the second one is dead, and nobody has noticed
    second.send(transfer_messages.piece_of(b"xxx"))
    for at in range(transfer_messages.PIECE_BYTES, len(content), transfer_messages.PIECE_BYTES):
        third.send(transfer_messages.piece_of(content[at : at + transfer_messages.PIECE_BYTES]))
    assert third.receive() == FileTaken()
    assert (partial.with_name("tensors.safetensors")).read_bytes() == content
    assert complete(side.out / "checkpoints") == []
    assert ask(third, whole) == FileTaken()
    assert ["tensors.safetensors" in line for line in side.server.close_run(RUN)] == [True]
    assert not partial.parent.exists(), "what never became complete"
    assert ask(third, whole) == Refused(UNKNOWN_RUN)


def test_runs_that_the_next_controller_does_not_have_yet(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "AGAIN_S", 0.02)
    spool = side.agent(opened=False)
    side.write(spool)
    time.sleep(0.2)
    assert side.mover.pending(RUN)
    side.server.open_run(RUN, side.out, goes_on=True)
    until(lambda: complete(side.out / "checkpoints"))


def test_a_controller_that_comes_back_elsewhere(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "AGAIN_S", 0.02)
    monkeypatch.setattr(mover, "DIAL_LIMIT_S", 0.2)
    spool = side.agent()
    side.server.close()
    side.write(spool)
    until(lambda: side.told)
    assert "files for the controller wait" in side.told[0]
    side.server = FileTransferServer("127.0.0.1", TOKEN)
    side.server.open_run(RUN, side.out, goes_on=True)
    side.mover.use(f"127.0.0.1:{side.server.port}", TOKEN)
    until(lambda: complete(side.out / "checkpoints"))


def test_no_room_at_the_controller_is_told_and_the_host_goes_on(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastune.runtime.agents import transfer_server as inbox

    def full(self: object, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inbox.IncomingFile, "take", full)
    spool = side.agent()
    side.write(spool)
    until(lambda: not side.mover.pending(RUN))
    assert side.server.news() == [(RUN, CheckpointFailed(3, "at the controller: No space left on device"))]
    assert complete(side.out / "checkpoints") == []


# -- a worker's side --------------------------------------------------------------------------------------------------


def test_a_writer_waits_for_an_agent_that_is_behind_and_then_does_without(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.make()
    near = LocalStorage(spool, limit_s=0.1)
    for step in (1, 2):
        at = near.draft(f"{step}-1-0")
        near.make_room(at, leads=True)
        near.written(at, contribute(at, CheckpointPart.of(states())).file)
    with pytest.raises(NoRoom, match="2 checkpoints are not with the controller"):
        near.make_room(near.draft("3-1-0"), leads=True)
    path, ticket = spool.tickets()[0]
    assert spool.file_of(ticket).is_file()
    spool.gone(path, ticket)
    near.make_room(near.draft("3-1-0"), leads=True)
    assert spool.waiting("ff") == 0


def test_what_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """A part of which no ticket came, since another writer was lost."""
    spool = Spool(tmp_path)
    spool.make()
    near = LocalStorage(spool)
    at = near.draft("1-1-0")
    contribute(at, CheckpointPart.of(states()))
    assert at.is_dir()
    near.draft("1-1-1")
    assert not at.exists()


def test_what_a_program_writes_into_a_spool_is_no_note(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.make()
    (tmp_path / "outbox" / "00-ab-cd").write_text("{}")
    (tmp_path / "outbox" / "0-0-0").symlink_to("/etc/hostname")
    (tmp_path / "wishes" / "ab").write_bytes(b"\xff" * (1 << 17))
    assert spool.tickets() == []
    assert spool.wishes() == []


def test_an_agent_that_never_answers(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.make()
    with pytest.raises(UserError, match="not brought it within"):
        spool.ask(CheckpointRequest("own"), limit_s=0.05)

    def answer() -> None:
        until(lambda: len(spool.wishes()) == 2)
        for path, _ in spool.wishes():
            spool.answer(path, CheckpointReply(error="it burns"))

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(UserError, match="it burns"):
        spool.ask(CheckpointRequest("own"))
    thread.join()
