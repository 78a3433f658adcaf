"""The site (``make docs``) has every page and every public name; its contents are the lists of docs/index.md."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.pages.blocks import PAGES, ROOT

import elastune


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(conf: ModuleType, page: str) -> set[Path]:
    """The pages in a page's tables of contents."""
    tables = conf.table_of_contents(page, (ROOT / f"{page}.md").read_text())
    return {Path(f"{target}.md") for target in re.findall(r"</([^>]+)>$", tables, re.MULTILINE)}


def test_every_page_is_in_the_contents(conf: ModuleType) -> None:
    found = {Path("docs/index.md")}.union(*(entries(conf, page) for page in conf.CONTENTS))
    assert set(PAGES) <= found
    assert {Path("CONTRIBUTING.md"), Path("CHANGELOG.md"), Path("SECURITY.md")} <= found


def test_contents_are_read_in_order(conf: ModuleType) -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    captions = re.findall(r":caption: (.*)", conf.table_of_contents("docs/index", text))
    assert captions[:6] == ["Start", "Programs", "Run", "Frontier", "Tune", "Clusters"]


def test_a_list_of_links_is_a_table_of_contents(conf: ModuleType) -> None:
    text = (
        "# Page\n\n- [Not](here.md)\n\n## One\n\n- [A page](a.md): why\n- [Up](../README.md)\n- [Heading](b.md#part)\n"
    )
    (shown,) = re.findall(r"caption: One\n\n(.*?)\n```", conf.table_of_contents("docs/index", text), re.DOTALL)
    assert shown == "A page </docs/a>\nUp </README>"


def test_the_reference_has_every_public_name() -> None:
    shown = (ROOT / "docs" / "reference" / "python.md").read_text()
    names = re.findall(r"^\.\. auto(?:class|function|exception|module):: elastune\.(\w+)$", shown, re.MULTILINE)
    assert sorted(names) == sorted(elastune.__all__)


def test_the_reference_has_every_kit_and_what_it_is_for() -> None:
    shown = (ROOT / "docs" / "reference" / "contracts.md").read_text()
    kits = {path.stem for path in (ROOT / "src" / "elastune" / "testing" / "kits").glob("*.py")}
    missing = {kit for kit in kits if f"elastune.testing.kits.{kit}" not in shown}
    assert missing == {"__init__", "cluster_workers"}, "the last one serves another kit"
