"""The loggers mlflow and wandb for real: a folder of MLflow's, and W&B offline. The other loggers' kits are the twin.

What was logged is read back by MLflow's own client, and from the file that ``wandb sync`` uploads.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastune.loggers.mlflow import EVENTS, MlflowLogger
from elastune.loggers.wandb import WandbLogger
from elastune.runtime.logger import Logger
from elastune.testing.kits.logger import FINISHED, STARTED, LoggedRun, LoggerKit, reported

pytestmark = pytest.mark.soak


class TestMlflow(LoggerKit):
    def make(self, folder: Path) -> Logger:
        return MlflowLogger(experiment="kit", uri=str(folder))

    def read(self, out: Path, folder: Path) -> dict[str, LoggedRun]:
        import mlflow

        client = mlflow.MlflowClient(str(folder))
        experiment = client.get_experiment_by_name("kit")
        found = [] if experiment is None else client.search_runs([experiment.experiment_id])
        roots = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
        assert len(roots) <= 1
        runs = {}
        for run in found:
            parent = run.data.tags.get("mlflow.parentRunId")
            assert parent is None or parent == roots[0].info.run_id
            name = "" if parent is None else run.info.run_name.replace(" ", "-")
            logged = runs[name] = LoggedRun(None if parent is None else "", settings=dict(run.data.params))
            for metric in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, metric)
                logged.values |= {(metric, each.step): each.value for each in history}
            tags = run.data.tags.items()
            logged.artifacts = {key.removeprefix("artifacts/"): value for key, value in tags if "artifacts/" in key}
            logged.ended = run.info.status in ("FINISHED", "FAILED", "KILLED")
            if client.list_artifacts(run.info.run_id):
                logged.lines = Path(client.download_artifacts(run.info.run_id, EVENTS)).read_text().splitlines()
        return runs

    def test_a_long_curve_takes_several_requests(self) -> None:
        many = {f"m{i}": float(i) for i in range(60)}
        self.log(STARTED, *(reported(step, **many) for step in range(10, 410, 10)), FINISHED)
        values = self.logged()[""].values
        assert values["metrics/m59", 400] == 59


class TestWandb(LoggerKit):
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")

    def make(self, folder: Path) -> Logger:
        return WandbLogger(project="kit")

    def read(self, out: Path, folder: Path) -> dict[str, LoggedRun]:
        ids = json.loads((out / "loggers" / "wandb.json").read_text())["ids"] if (out / "loggers").exists() else {}
        runs = {}
        for name, id_ in ids.items():
            run = runs[name] = LoggedRun()
            for file in sorted(out.glob(f"wandb/offline-run-*/run-{id_}.wandb")):
                for record in records_of(file):
                    add(run, record, ids)
        return runs


def add(run: LoggedRun, record: Any, ids: dict[str, str]) -> None:
    """Add a record of W&B's to ``run``. Trials name their study in the config and as their group."""
    match record.WhichOneof("record_type"):
        case "run":
            for item in record.run.config.update:
                run.settings |= flat(item.key or ".".join(item.nested_key), json.loads(item.value_json))
            if "parent" in run.settings:
                assert run.settings["parent"] == record.run.run_group == ids[""]
                run.parent = ""
            run.ended = False
        case "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if isinstance(value, str):
                    run.lines.append(value)
                elif "step" in row:
                    run.values[name, row["step"]] = float(value)
        case "summary":
            for item in record.summary.update:
                if item.key.startswith("artifacts/"):
                    run.artifacts[item.key.removeprefix("artifacts/")] = json.loads(item.value_json)
                elif item.key == "state":  # what is in the history, too, has a nested key here
                    run.lines.append(json.loads(item.value_json))
        case "exit":
            run.ended = True


def flat(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {key: text for part, each in value.items() for key, text in flat(f"{name}.{part}", each).items()}
    return {name: value if isinstance(value, str) else json.dumps(value)}


HEADER, BLOCK, CHUNK = 7, 32768, 7
LAST_OF_A_RECORD = (1, 4)  # a whole one, and the last of several chunks


def records_of(file: Path) -> Iterator[Any]:
    """The records in W&B's file: LevelDB's log format, behind a header."""
    from wandb.proto import wandb_internal_pb2

    data, at, begun = file.read_bytes(), HEADER, b""
    while at + CHUNK <= len(data):
        if (left := BLOCK - at % BLOCK) < CHUNK:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        begun += data[at + CHUNK : at + CHUNK + length]
        at += CHUNK + length
        if kind in LAST_OF_A_RECORD:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(begun)
            begun = b""
            yield record
