"""Every block of shell in the pages runs, in the order of its page, and prints what the page shows behind it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.pages.blocks import PAGES, Block, blocks
from tests.pages.folders import LIMIT_S, shell, stage

SMALLER = (
    (r"--trials \d+", "--trials 4"),
    (r"(elastune tune .*)--budget \d+m", r"\1--budget 60s"),
    (r"(elastune frontier .*)--budget \d+m", r"\1--budget auto"),
)
"""The sizes of a search. A frontier takes as long as its phases need: on a busy machine its minutes may be too few."""


def smaller(code: str) -> str:
    for pattern, text in SMALLER:
        code = re.sub(pattern, text, code)
    return code


def shape(line: str) -> str:
    """A pattern for a line that a page shows: any numbers and digests; "..." stands for whatever is there."""
    text = re.escape(" ".join(line.split())).replace(re.escape("..."), ".*").replace("\\ ", r"\s*")
    return re.sub(
        r"[0-9a-f]{64}|\d[\d,]*(?:\\\.\d+)?", lambda found: "[0-9a-f]{64}" if len(found[0]) == 64 else r"[\d.,]+", text
    )


def prints(block: Block, shown: str) -> list[str]:
    """The lines of a block that what was printed does not have."""
    printed = [" ".join(line.split()) for line in shown.splitlines()]
    return [line for line in block.code.splitlines() if line and not any(re.match(shape(line), one) for one in printed)]


def pages() -> list[Path]:
    return [page for page in PAGES if any(block.language == "sh" and not block.not_run for block in blocks(page))]


@pytest.mark.soak
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("page", pages(), ids=str)
def test_shell_of_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    stage(page, tmp_path)
    printed, wrong = "", []
    for block in blocks(page):
        if block.not_run:
            continue
        if block.language == "sh":
            printed = shell(smaller(block.code), tmp_path)
        elif block.language == "text" and block.after is not None and block.after.language == "sh":
            wrong += [f"{block.place}: {line}\n{printed}" for line in prints(block, printed)]
    assert wrong == []


def test_a_line_that_was_not_printed_is_found() -> None:
    block = Block(
        Path("page.md"), 1, "text", "[   32.0 s] done: accuracy 0.9723\nreport OUT/report.html\nsaid ... end\n"
    )
    assert prints(block, "[1.0 s] done: accuracy 1\nreport   OUT/report.html\nsaid what end") == []
    assert prints(block, "done: accuracy 1\nsaid what") == block.code.splitlines()
