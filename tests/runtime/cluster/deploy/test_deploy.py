"""Files for other systems: what they say, that those systems know the words, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastune.cli import main
from elastune.runtime.deployment import SYSTEMS, Deployment, deployment, render

ROOT = Path(__file__).parents[4]
SHOWN = deployment(["train.py", "--epochs", "10"], image="ghcr.io/you/train:1", hosts=4, workers=8, gpus=8)
AMOUNT = {"type": "integer", "minimum": 1}
# Written from SkyPilot 0.14's documentation of its YAML: of its fields, those that are used here. The package itself
# (sky.Task.from_yaml_config of 0.14.1, which took the file in deploy/) needs other versions than ours of what both use.
SKYPILOT_TASK: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": AMOUNT,
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "image_id": {"type": "string", "pattern": "^docker:"},
                "cpus": {"type": "string", "pattern": r"^[0-9]+\+?$"},
                "accelerators": {"type": "string", "pattern": "^[^:]+:[0-9]+$"},
                "use_spot": {"type": "boolean"},
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "recover_on_exit_codes": {"type": "array", "items": {"type": "integer", "maximum": 255}},
                    },
                },
            },
        },
        "volumes": {"type": "object", "additionalProperties": {"type": "string"}},
        "file_mounts": {"type": "object", "additionalProperties": {"type": "string"}},
        "run": {"type": "string"},
    },
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_shown_files_are_those_that_are_rendered(system: str) -> None:
    assert (ROOT / "deploy" / f"{system}.yaml").read_text() == render(system, SHOWN)


@pytest.mark.parametrize("gpus", [0, 8])
def test_kubernetes_knows_all_that_a_jobset_says(gpus: int) -> None:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    wanted = deployment(["train.py"], image="train", gpus=gpus)
    read = yaml.safe_load(render("jobset", wanted))
    assert JobsetV1alpha2JobSet.from_dict(read).to_dict() == read  # it drops what it does not know


def test_pods_of_a_jobset_are_named_as_agents_call_them() -> None:
    read = yaml.safe_load(render("jobset", SHOWN))
    controller, agents = read["spec"]["replicatedJobs"]
    command = agents["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    # https://jobset.sigs.k8s.io: <jobset>-<replicated job>-<job>-<pod>.<subdomain>, the last the jobset's name
    assert command[command.index("--join") + 1] == f"train-{controller['name']}-0-0.train:7070"


@pytest.mark.parametrize("gpus", [0, 8])
def test_skypilot_knows_all_that_a_task_says(gpus: int) -> None:
    wanted = deployment(["train.py"], image="train", gpus=gpus)
    jsonschema.validate(yaml.safe_load(render("skypilot", wanted)), SKYPILOT_TASK)


def test_a_script_runs_what_it_is_to_run_and_nothing_of_its_words(tmp_path: Path) -> None:
    wanted = deployment(["train.py", "--set", f"name=$(touch {tmp_path}/ran) '\"`;"], image="train", hosts=2)
    for name in ("elastune", "python3", "chmod"):
        (tmp_path / name).write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done >> {tmp_path}/{name}.said\n')
        (tmp_path / name).chmod(0o755)
    script = yaml.safe_load(render("skypilot", wanted))["run"]
    for rank in ("0", "1"):
        environment = {
            "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/ho me", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NODE_RANK": rank,
        }  # fmt: skip
        subprocess.run(["sh", "-c", script], env=environment, check=True, capture_output=True)  # waits for all
    assert not (tmp_path / "ran").exists()
    said = (tmp_path / "elastune.said").read_text().splitlines()
    assert said.count("agent") == 2
    assert said.count("10.0.0.1:7070") == 2
    assert said.count("/ho me/elastune-token") == 3
    assert wanted.command[2] in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nomad", "train.py"], "knows jobset and skypilot (got 'nomad')"),
        (["jobset", "--", "--epochs", "3"], "a deployment runs a program"),
        (["jobset", "--", "train.py", "--out=/x"], "sets where workers run (got --out=/x)"),
        (["jobset", "train.py", "--hosts", "0"], "--hosts: input should be greater than or equal to 1 (got 0)"),
        (["jobset", "train.py", "--port", "80"], "--port: input should be greater than or equal to 1024"),
        (["jobset", "train.py", "--name", "Träin"], "--name: string should match pattern"),
        (["jobset", "train.py", "--name", "a" * 41], "--name: string should match pattern"),
        (["skypilot", "--", "a.py", "x\ny"], "of printable characters"),
    ],
)
def test_what_cannot_be_deployed_is_refused_in_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "--image", "train", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert told in error
    assert error.count("\n") == 1


def test_an_image_is_one_word() -> None:
    assert main(["deploy", "jobset", "--image", "a b", "train.py"]) == 2


def test_a_deployment_is_checked_however_it_is_made() -> None:
    with pytest.raises(ValueError, match="hosts"):
        Deployment(("train.py",), "train", hosts=0)
