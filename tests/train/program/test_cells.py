"""Modules written from a notebook's cells: what is in them, and what is refused."""

from __future__ import annotations

import linecache
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import elastune
from elastune.core.errors import UserError
from elastune.train.program.cells import is_of_cell, module_of_cells

Cells = Callable[..., dict[str, Any]]


@pytest.fixture
def cells() -> Iterator[Cells]:
    """A function that runs cells as IPython does, in a ``__main__`` without a file; returns its names."""
    main, before, names = types.ModuleType("__main__"), sys.modules["__main__"], []
    main.__dict__.pop("__file__", None)
    sys.modules["__main__"] = main

    def run(*texts: str) -> dict[str, Any]:
        for text in texts:
            name = f"<ipython-input-{len(names)}>"
            names.append(name)
            linecache.cache[name] = len(text), None, text.splitlines(True), name
            exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)
        return main.__dict__

    yield run
    sys.modules["__main__"] = before
    for name in names:
        linecache.cache.pop(name, None)


def made(names: dict[str, Any], train: str = "train") -> dict[str, Any]:
    """The names of the module that is written for ``train``."""
    module: dict[str, Any] = {"__name__": __name__}  # dataclasses look their module up
    exec(compile(module_of_cells(names[train]), "written.py", "exec", dont_inherit=True), module)
    return module


def test_what_a_training_uses_comes_with_it(cells: Cells) -> None:
    names = cells(
        "import math\nfrom math import sqrt as root\nimport os.path as places\nFACTOR, UNUSED = 3, object()\n",
        "def half(x):\n    # a comment stays\n    return x / 2\n\ndef quarter(x):\n    return half(half(x))",
        "def train(session):\n    return FACTOR * quarter(root(session)) + math.pi, places.sep",
    )
    module = made(names)
    assert module["train"](16) == (3 + math.pi, "/")
    assert "UNUSED" not in module
    assert "# a comment stays" in module_of_cells(names["train"])


def test_classes_decorators_defaults_and_recursion(cells: Cells) -> None:
    names = cells(
        "from dataclasses import dataclass\nfrom functools import wraps, cache\nSTART = 5",
        "def loud(f):\n    @wraps(f)\n    def call(*a):\n        return f(*a) * 2\n    return call",
        "@dataclass\nclass Base:\n    size: int = 1",
        "class Net(Base):\n    def grow(self):\n        return self.size + START",
        "@cache\n@loud\ndef down(n, begin=START):\n    return n if n < 1 else down(n - 1) + begin",
        "def train(session):\n    total = sum(Net(i).grow() for i in range(3))\n    return down(1), total",
    )
    assert made(names)["train"](None) == names["train"](None) == (10, 18)


def test_the_newest_definition_counts(cells: Cells) -> None:
    names = cells("def f():\n    return 1", "def f():\n    return 2", "def train(session):\n    return f()")
    assert made(names)["train"](None) == 2
    cells("def train(session):\n    return -f()")
    assert made(names)["train"](None) == -2


def test_a_local_name_is_not_that_of_the_notebook(cells: Cells) -> None:
    names = cells(
        "x = object()\nrow = object()", "def train(session):\n    x = 1\n    return x + sum(row for row in [2])"
    )
    assert made(names)["train"](None) == 3


def test_the_contract_of_a_file_comes_too(cells: Cells) -> None:
    names = cells(
        "import elastune\nconfig = {'lr': 0.1, 'layers': [1, 2]}\nobjectives = {'loss': 'min'}",
        "class Mine(elastune.Policy):\n    def after_step(self, run):\n        pass",
        "def space(trial):\n    return {'lr': trial.suggest_float('lr', 0, 1)}",
        "def train(session):\n    pass",
    )
    module = made(names)
    assert module["config"] == {"lr": 0.1, "layers": [1, 2]}
    assert module["objectives"] == {"loss": "min"}
    assert issubclass(module["Mine"], elastune.Policy)
    assert callable(module["space"])


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("import torch\nused = torch.ones(2)", "used, a Tensor"),
        ("used = open", ""),
        ("used = float('nan')", "used, a float"),
        ("used = [object()]", "used, a list"),
        ("used = lambda: 1", "used, which is no function at the top level of a cell"),
        (
            "def outer():\n    def used():\n        return 1\n    return used\nused = outer()",
            "used, which is no function",
        ),
        ("used = 'x' * 200_000", "used, a str"),
        ("", "used, which train uses and no cell defines"),
    ],
)
def test_what_no_worker_could_have_is_refused(cells: Cells, cell: str, value: str) -> None:
    names = cells(cell, "def train(session):\n    return used")
    if not value:
        assert made(names)["train"](None) is open
        return
    with pytest.raises(UserError) as error:
        module_of_cells(names["train"])
    assert str(error.value.value).startswith(value)
    assert error.value.page == "docs/notebooks.md"


def test_functions_of_files_and_prompts_are_of_no_cell() -> None:
    typed: dict[str, Any] = {}
    exec("def train(session): pass", typed)
    assert not is_of_cell(typed["train"])
    assert not is_of_cell(made)
    assert not is_of_cell(len)
