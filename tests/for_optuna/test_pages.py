"""What is shown of ``elastune.optuna`` runs: the script of its page, and the package of OptunaHub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import TrialState

from elastune.tuning.search.history import quiet

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "integrations" / "optunahub" / "package" / "samplers" / "elastune"
# What optunahub.load_module does with a package of the registry, from this folder.
LOADER = """
import importlib.util, runpy, sys, types
def load_module(package):
    spec = importlib.util.spec_from_file_location("hub", f"{sys.argv[1]}/{package}/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
sys.modules["optunahub"] = types.SimpleNamespace(load_module=load_module)
runpy.run_path(f"{sys.argv[1]}/samplers/elastune/example.py")
"""


def test_the_package_has_the_files_and_the_head_that_the_registry_asks_for() -> None:
    assert {file.name for file in PACKAGE.iterdir()} >= {
        *("LICENSE", "README.md", "__init__.py", "example.py", "requirements.txt"),
    }
    _, head, body = (PACKAGE / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert {"author", "title", "description", "tags", "optuna_versions", "license"} <= fields.keys()
    assert fields["license"] == "Apache-2.0"
    assert [line for line in body.splitlines() if line.startswith("## ")][:4] == [
        *("## Abstract", "## APIs", "## Installation", "## Example"),
    ]
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_example_runs() -> None:
    command = [sys.executable, "-c", LOADER, str(PACKAGE.parents[1])]
    done = subprocess.run(command, env={**os.environ, "TRIALS": "8"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "trials were stopped early" in done.stdout


def test_the_script_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "optuna.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    script = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    given: dict[str, Any] = {"make_model": lambda lr, width: [lr, width, 0], "train_one_epoch": train_one_epoch}
    with quiet():
        exec(script.replace("n_trials=100", "n_trials=6"), given)
    states = {trial.state for trial in given["study"].trials}
    assert states == {TrialState.COMPLETE, TrialState.PRUNED}
    assert "optuna.create_study(directions=[" in diff


def train_one_epoch(model: list[float]) -> tuple[float, float]:
    model[2] += 1
    lr, width, epoch = model
    return abs(lr - 0.1) + 1 / epoch, width * epoch
