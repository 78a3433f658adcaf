"""The site: all pages of the repository, with the reference that docstrings and commands give. ``make docs`` builds it.

The source folder of the build is the repository itself, so that one link works on GitHub and in the site.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from elastune.cli.reference import commands_reference

project = "elastune"
author = "elastune contributors"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md"]
exclude_patterns = [".venv", ".git", ".*_cache", "build", "src", "tests", "elastune-out"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # with the names that GitHub gives them
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"show-inheritance": False}
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Keywords", "params_style")]
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "elastune"
html_copy_source = False

CONTENTS = ("docs/index", "docs/decisions/README")
"""Pages whose lists of links are the site's tables of contents: on GitHub they are lists, and nothing else."""


def table_of_contents(page: str, text: str) -> str:
    """The tables of contents that a page's lists of links mean: one for each heading, with the heading as caption."""
    folder, tables = PurePosixPath(page).parent, []
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        targets = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\.md\)", section, re.MULTILINE)
        entries = [f"{title} </{_joined(folder, target)}>" for title, target in targets]
        if entries:
            caption = section.splitlines()[0]
            tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"]))
    return "\n\n".join(tables)


def _joined(folder: PurePosixPath, target: str) -> PurePosixPath:
    root = Path("/")
    return PurePosixPath((root / folder / target).resolve().relative_to(root))


def complete(app: Any, page: str, source: list[str]) -> None:
    """Add to a page what is not written by hand."""
    if page in CONTENTS:
        source[0] += "\n\n" + table_of_contents(page, source[0])
    if page == "docs/reference/commands":
        source[0] += "\n\n" + commands_reference()


def setup(app: Any) -> None:
    app.connect("source-read", complete)
