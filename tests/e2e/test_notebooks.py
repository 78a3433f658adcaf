"""elastune in notebooks, in a kernel of IPython's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FIRST = Path(__file__).parents[2] / "examples" / "first.ipynb"


def executed(notebook: Any, folder: Path) -> Any:
    """``notebook`` with the outputs of its cells. A cell that raises ends it."""
    options = {"timeout": 240, "kernel_name": "python3", "resources": {"metadata": {"path": str(folder)}}}
    return NotebookClient(notebook, **options).execute()


def shown(cell: Any, kind: str = "text/html") -> list[str]:
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]


def test_the_first_notebook(tmp_path: Path) -> None:
    """Its own assertion holds that two workers train what one does."""
    notebook = executed(nbformat.read(FIRST, as_version=4), tmp_path)
    one, two, study, front, pick = [cell for cell in notebook.cells if cell.cell_type == "code"][2:]
    for cell, title in ((one, "one: accuracy"), (two, "two: accuracy"), (study, "Trial "), (front, "<table>")):
        (html,) = shown(cell)
        assert title in html
    for cell in (one, two, study):
        progress = [text for text in shown(cell, "text/plain") if "100%" in text]
        assert len(progress) == 1, "one display, which was replaced"
        assert len(progress[0].splitlines()) < 10
        assert not [output for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
    assert pick.outputs[0].text.startswith("elastune run search/train.py") or "search/train.py" in pick.outputs[0].text
    assert (tmp_path / "one" / "train.py").exists()
    assert "metrics/accuracy" in (tmp_path / "two" / "csv" / "values.csv").read_text()
