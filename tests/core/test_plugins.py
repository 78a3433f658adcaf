"""Extensions of other packages: which are there, what importing them gives, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.fake_package import write_package

from elastune.core.errors import UserError
from elastune.core.plugins import Plugins

TOYS = Plugins("elastune.toys", "toy")
SOURCE = """
class Ball:
    name = "ball"

class Stick(Ball):
    pass

number = 7
"""
POINTS = {
    "ball": "toys_for_plugins:Ball",
    "stick": "toys_for_plugins:Stick",
    "number": "toys_for_plugins:number",
    "absent": "toys_for_plugins:absent",
    "raises": "toys_that_raise:Ball",
    "nowhere": "toys_that_are_nowhere:Ball",
}


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"toys_for_plugins": SOURCE, "toys_that_raise": "raise RuntimeError('no licence')"}
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "site", {TOYS.group: POINTS}, modules)))


def ball_class() -> type:
    return TOYS.load("ball")  # type: ignore[no-any-return]


def test_names_are_known_without_an_import() -> None:
    sys.modules.pop("toys_for_plugins", None)
    assert TOYS.names() == tuple(sorted(POINTS))
    assert TOYS.package("ball") == "toys 1.0"
    assert "toys_for_plugins" not in sys.modules
    assert Plugins("elastune.nothing", "thing").names() == ()


def test_a_package_that_comes_onto_the_path_later_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = TOYS.names()
    points = {TOYS.group: {"kite": "kites:Kite"}}
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "more", points, {}, name="kites")))
    assert set(TOYS.names()) == {*before, "kite"}


def test_a_class_is_loaded_by_its_name() -> None:
    assert TOYS.load_class("ball", ball_class()) is ball_class()
    assert TOYS.load_class("stick", ball_class(), named=False).__name__ == "Stick"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "must load: AttributeError: .*absent.* uninstall toys 1.0"),
        ("raises", "must load: RuntimeError: no licence .got raises = toys_that_raise:Ball"),
        ("nowhere", "must load: ModuleNotFoundError"),
        ("number", "must be a subclass of toys_for_plugins.Ball"),
        ("stick", "the name of its entry point .got 'ball'.: set name = 'stick'"),
    ],
)
def test_a_broken_extension_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TOYS.load_class(name, ball_class())


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {TOYS.group: {"ball": "rivals:Ball", "stick": POINTS["stick"]}}
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "rivals", points, {}, name="rivals")))
    with pytest.raises(UserError, match="one installed package alone may offer the toy ball"):
        TOYS.load("ball")
    assert TOYS.load("stick").__name__ == "Stick"  # both name the same class
