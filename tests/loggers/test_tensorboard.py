"""The logger tensorboard: its kit, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastune.loggers.tensorboard import FOLDER, TensorBoardLogger
from elastune.runtime.logger import Logger
from elastune.testing.kits.logger import FINISHED, STARTED, LoggedRun, LoggerKit, decided, reported


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
    result.Reload()
    return result


class TestTensorBoard(LoggerKit):
    def make(self, folder: Path) -> Logger:
        return TensorBoardLogger()

    def read(self, out: Path, folder: Path) -> dict[str, LoggedRun]:
        runs = {}
        folders = {path.parent for path in (out / FOLDER).rglob("events.*")}
        for each in folders:
            events = accumulated(each)
            name = "" if each.name == FOLDER else each.name
            run = runs[name] = LoggedRun(parent="" if name else None)
            for tag in events.Tags()["scalars"]:
                run.values |= {(tag, each.step): each.value for each in events.Scalars(tag)}
            for tag in events.Tags()["tensors"]:
                topic = tag.removesuffix("/text_summary")
                texts = [each.tensor_proto.string_val[0].decode() for each in events.Tensors(tag)]
                run.lines += texts
                if topic == "settings":
                    run.settings = dict(line.strip().split(": ", 1) for line in texts[-1].splitlines())
                if topic.startswith("artifacts/"):
                    run.artifacts[topic.removeprefix("artifacts/")] = texts[-1]
                run.ended |= topic == "state"
        return runs

    def test_events_have_the_time_of_their_records(self) -> None:
        self.log(STARTED, reported(10, accuracy=0.5), decided(10), FINISHED)
        from elastune.core.journal.files import read

        times = [entry.at for entry in read(self.out / "journal.jsonl")]
        (event,) = accumulated(self.out / FOLDER).Scalars("metrics/accuracy")
        assert event.wall_time == pytest.approx(times[1])
