"""Errors name the page that tells more: each page and heading is there, and what is met in the first hour has one."""

from __future__ import annotations

import copy
import gc
import json
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import PAGES, UserError, page_of
from elastune.core.mesh import Mesh
from elastune.core.run import Program
from elastune.runtime.clusters.registry import parse_cluster
from elastune.train.program import space as spaces
from elastune.train.program.load import load

ROOT = Path(__file__).parents[2]


def headings(page: Path) -> set[str]:
    """As links name them: lower case, without punctuation, hyphens for blanks."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("name", PAGES)
def test_each_page_and_its_heading_are_there(name: str) -> None:
    page, _, heading = PAGES[name].partition("#")
    assert not page or (ROOT / page).is_file()
    assert not heading or heading in headings(ROOT / page)
    assert stands(name), "what it is the page of"


def stands(name: str) -> bool:
    """Whether ``name`` is a folder or a file of the package, or a class, function or method of a file."""
    place = ROOT / "src" / "elastune" / name.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    file, definition = place.parent.with_suffix(".py"), rf"^(class|def) {place.name}\b"
    if not file.is_file():
        file, definition = place.parent.parent.with_suffix(".py"), rf"^    def {place.name}\b"
    return file.is_file() and re.search(definition, file.read_text(), re.MULTILINE) is not None


def test_the_longest_name_counts() -> None:
    assert page_of("elastune.train.data.stream") == "docs/programs.md#streams"
    assert page_of("elastune.train.data.source") == "docs/programs.md#data"
    assert page_of("elastune.train.session") == page_of("elastune.train") == "docs/programs.md"
    assert page_of("elastune.trainer") == page_of("train.data") == page_of("elastune") == page_of("") == ""


def prepared(session: Any) -> nn.Module:
    model = nn.Linear(2, 1)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def backward_outside(session: Any) -> None:
    session.backward(prepared(session)(torch.ones(1, 2)).sum())


def samples() -> TensorDataset:
    return TensorDataset(torch.ones(4, 2))


FIRST_HOUR: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no such file": (lambda session: load(Program(Path("none.py"))), "README.md#your-program"),
    "no batch size": (lambda session: session.batches(samples()), "docs/programs.md#data"),
    "no model": (lambda session: session.batches(samples(), 2), "docs/programs.md"),
    "no optimizer": (
        lambda session: session.prepare(nn.Linear(2, 1)),
        "docs/programs.md#several-models-and-optimizers",
    ),
    "backward": (backward_outside, "docs/programs.md#several-losses-of-a-batch"),
    "clipping": (lambda session: session.clip_grad_norm_(0), "docs/programs.md"),
    "nothing to track": (
        lambda session: session.track("it", 1),
        "docs/programs.md#state-files-an-end-of-the-programs-own",
    ),
    "mesh": (lambda session: Mesh.parse("data=none"), "docs/meshes.md"),
    "space": (lambda session: spaces.probe(lambda trial: 3, 1, seed=0), "docs/spaces.md"),
    "cluster": (lambda session: parse_cluster("nowhere"), "docs/clusters.md"),
}


@pytest.mark.parametrize("name", FIRST_HOUR)
def test_what_is_met_in_the_first_hour_has_a_page(tmp_path: Path, name: str) -> None:
    act, page = FIRST_HOUR[name]
    with pytest.raises(UserError) as raised:
        act(lone_session(tmp_path))
    assert str(raised.value).endswith(f" ({page})")


def test_it_is_told_in_another_process_with_its_page() -> None:
    """Whoever makes it there is of another room."""
    with pytest.raises(UserError) as raised:
        Mesh.parse("data=none")
    data = json.loads(json.dumps(raised.value.parts))
    assert str(UserError(*data)) == str(copy.copy(raised.value)) == str(raised.value)
    assert str(raised.value).endswith(" (docs/meshes.md)")


def test_a_value_that_looks_like_a_page_is_none() -> None:
    with pytest.raises(UserError) as raised:
        load(Program(Path("docs/none.py")))
    assert str(raised.value).endswith(" (README.md#your-program)")


def test_it_keeps_nothing_that_the_lines_which_made_it_had() -> None:
    class Large:
        """A model, say."""

    def fails() -> None:
        held = Large()
        seen.append(weakref.ref(held))
        raise UserError("a range is one", 3, "use two")

    seen: list[weakref.ref[Large]] = []
    gc.collect()
    gc.disable()
    try:
        with suppress(UserError):
            fails()
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_fix_that_names_a_page_is_enough() -> None:
    error = UserError("a range is one", 3, "see docs/spot.md")
    error.page = "docs/spaces.md"
    assert str(error) == "a range is one (got 3): see docs/spot.md"
    assert str(UserError("a range is one", 3, "use two")) == "a range is one (got 3): use two", "made by no room"
