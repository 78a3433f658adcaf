"""Every block of Python in the README and in docs/ runs, on a session of one worker where it uses one."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.nn.functional as F
from tests.pages.blocks import ROOT, Block, all_blocks
from tests.pages.folders import stage
from tests.pages.scene import Scene, unknown

from elastune.adapt.policies.base import Policy
from elastune.train.program.space import probe

BLOCKS = all_blocks("python")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.place, marks=[pytest.mark.soak] if block.soak else [])
        for block in BLOCKS
        if not block.not_run
    ],
)
def test_python_of_the_pages_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for earlier in reversed(block.before):
        if earlier.file:
            monkeypatch.setitem(sys.modules, Path(earlier.file).stem, module_of(earlier, tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    if '"OUT"' in block.code:
        stage(block.page, tmp_path)
    use(module_of(block, tmp_path), tmp_path)


def module_of(block: Block, folder: Path) -> ModuleType:
    """Run a block: once, in the batches of an epoch if it has the lines of a batch."""
    scene, module = Scene(folder, block.code), ModuleType("shown")
    names = vars(module)
    given = unknown(block.code)
    names.update({name: scene[name] for name in sorted(given - {"loss"})})
    names.update(scene.made)
    body = ast.parse("\n" * (block.line - 1) + block.code).body

    def run(lines: list[ast.stmt]) -> None:
        code = compile(ast.Module(lines, []), str(ROOT / block.page), "exec", dont_inherit=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "shown", module)  # dataclasses look there
            exec(code, names)

    if "loss" in given:
        in_batches(body, names, scene, run)
    elif "session" in given and "session.batches" in block.code and "session.epochs" not in block.code:
        for _ in names["session"].epochs(1):
            run(body)
    else:
        run(body)
    return module


def in_batches(body: list[ast.stmt], names: dict[str, Any], scene: Scene, run: Any) -> None:
    """Run lines that have the loss of a batch: those behind ``...``, or each line in a batch of its own."""
    rests = [isinstance(line, ast.Expr) and getattr(line.value, "value", None) is ... for line in body]
    parts = [body[rests.index(True) + 1 :]] if any(rests) else [[line] for line in body]
    if any(rests):
        run(body[: rests.index(True)])
    session, model, optimizer = (scene[name] for name in ("session", "model", "optimizer"))
    for _ in session.epochs(1):
        for part, (x, y) in zip(parts, session.batches(scene["loader"]), strict=False):
            names.update(loss=F.cross_entropy(model(x), y), targets=y, model=model, optimizer=optimizer)
            run(part)
            optimizer.step()
            optimizer.zero_grad()


def use(module: ModuleType, folder: Path) -> None:
    """Call what a block defines, as elastune would."""
    for name, made in list(vars(module).items()):
        if not isinstance(made, type) and getattr(made, "__module__", "") != "shown":
            continue
        if isinstance(made, type) and issubclass(made, Policy) and made is not Policy and made.__module__ == "shown":
            made()
        elif name == "space":
            assert len(probe(made, 3, seed=0)) == 3
        elif name == "surrogate":
            assert list(made({"lr": 0.1}, 2))
        elif name == "build":
            made(vars(module).get("config", {"width": 8}))
        elif name == "train":
            made(train_session(module, folder))
        elif name.startswith("test_"):
            made()


def train_session(module: ModuleType, folder: Path) -> Any:
    """A session for a ``train`` that a page shows; the model that the page does not show is prepared."""
    scene = Scene(folder / "train", "session.prepare" if "model" not in vars(module) else "pass")
    session = scene["session"]
    session.config.update(vars(module).get("config", {}))
    if "model" in vars(module):
        vars(module).update(model=scene["model"], optimizer=scene["optimizer"])
    return session
