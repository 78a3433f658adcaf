"""Where results go: one folder a run or study, never one that holds another's."""

from __future__ import annotations

from pathlib import Path

from elastune.core.errors import UserError

JOURNAL = "journal.jsonl"
DEFAULT_ROOT = Path("elastune-out")


def next_folder(program: Path, kind: str) -> Path:
    """The next free ``elastune-out/PROGRAM-KIND-N``."""
    taken = {path.name for path in DEFAULT_ROOT.glob("*")}
    stem = f"{program.stem}-{kind}"
    number = next(n for n in range(1, len(taken) + 2) if f"{stem}-{n}" not in taken)
    return DEFAULT_ROOT / f"{stem}-{number}"


def open_out(out: Path, resume: bool) -> Path:
    """The path of the journal in ``out``, made if needed. Refuses to mix a new run into an old one's folder."""
    path = out / JOURNAL
    if path.exists() and not resume:
        raise UserError("--out must be a new or empty folder", out, "use another --out, or --resume to go on")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--out must be a folder that can be written", error, "use another --out") from None
    return path
