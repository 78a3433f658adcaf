"""Read a journal."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from elastune.core.errors import UserError
from elastune.core.text import cut
from elastune.journal.entry import Entry, decode_entry

LONGEST_WHY = 300  # characters: a broken line can be a name of many megabytes


def read(path: Path) -> list[Entry]:
    """All entries, in order.

    A torn last line (a writer that crashed, or is still writing) is left out. Raises ``UserError`` where there is no
    such file, or, naming the line, where an earlier line is no record.
    """
    lines = _bytes(path).split(b"\n")
    whole, tail = lines[:-1], lines[-1]
    if whole and not tail and not _is_json(whole[-1]):
        whole.pop()
    return [_entry(path, number, line) for number, line in enumerate(whole, start=1)]


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for somebody to write into it
            raise UserError("a journal must be a file", path, "give the output folder of a run or a study")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError("a journal must exist", path, "give the output folder of a run or a study") from None
    except OSError as error:
        raise UserError("a journal must be readable", f"{path}: {error.strerror}", "check the path") from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _entry(path: Path, number: int, line: bytes) -> Entry:
    try:
        return decode_entry(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
    except ValueError as error:
        why = str(error)
    fix = f"restore the file, or delete line {number} if its record can be missed"
    raise UserError("every line of a journal must be a record", f"{path}, line {number}: {cut(why, LONGEST_WHY)}", fix)
