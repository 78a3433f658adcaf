"""The blocks of code in the pages, in their order, with what their markers say.

A marker is a comment on the line above a block:

    <!-- not run: WHY -->       another test runs it, or nothing here can
    <!-- soak -->               Python that trains: `make soak` runs it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = sorted(page.relative_to(ROOT) for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")))
FILE = re.compile(r"Write\s`([\w.]+)`[^:]*:$")
MARKER = re.compile(r"^<!-- (?:(not run): (.+)|(soak)) -->$")


@dataclass(frozen=True)
class Block:
    """A block between fences.

    Attributes:
        page: Path of its page in the repository.
        line: Number of its first line, from 1.
        language: What stands behind its fence.
        code: Its text.
        not_run: Why nothing runs it; "": it runs.
        soak: Whether it takes long.
        file: The file that the text before it names: "Write `cooler.py`:".
        after: The block before it on the page, as what a command prints stands behind the command.
    """

    page: Path
    line: int
    language: str
    code: str
    not_run: str = ""
    soak: bool = False
    file: str = ""
    after: Block | None = field(default=None, repr=False)

    @property
    def before(self) -> list[Block]:
        """The blocks before it on its page, the nearest first."""
        return [] if self.after is None else [self.after, *self.after.before]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page."""
    marker, last, said = None, None, ""
    for token in MarkdownIt().parse((ROOT / page).read_text()):
        if token.type == "fence":
            assert token.map is not None
            why, soak = (marker[2] or "", marker[3] is not None) if marker else ("", False)
            file = FILE.search(said)
            last = Block(page, token.map[0] + 2, token.info, token.content, why, soak, file[1] if file else "", last)
            yield last
        said = token.content if token.type == "inline" else said if token.type == "paragraph_close" else ""
        marker = MARKER.match(token.content.strip()) if token.type == "html_block" else None


def all_blocks(*languages: str) -> list[Block]:
    """The blocks in one of ``languages`` of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]
