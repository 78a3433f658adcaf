"""What docs/commands.md says of ``--json``, beside what is printed: all fields, both sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Fields = dict[str, "tuple[bool, Fields | None]"]
"""name -> whether it may be missing, and the fields of what it holds where these are named."""


PAGE = Path(__file__).parent.parent.parent / "docs" / "commands.md"


def documented(command: Callable[..., Any] | str, before: str = "--json: ") -> Fields:
    """The fields of the first object after ``before`` in the text on ``command``, or in a text."""
    text = command if isinstance(command, str) else text_on(command.__name__)
    text = " ".join(text.split())
    return _object(text[text.index(before) + len(before) :])


def text_on(command: str) -> str:
    """What the page says of the ``--json`` of ``command``."""
    _, _, text = PAGE.read_text().partition(f"### `elastune {command}`\n\n```text\n")
    assert text, f"{PAGE} has no text on elastune {command} --json"
    return text.partition("\n```")[0]


def _object(text: str) -> Fields:
    results: Fields = {}
    for part in _parts(text):
        names, _, rest = part.partition(":")
        rest = rest.strip()
        inner = rest.lstrip("[")
        fields = _object(inner) if inner.startswith("{") else {}
        sub = fields if len(fields) > 1 else None  # else it is a mapping, such as {state: count}, or left open
        comments = " ".join(re.findall(r"\(([^)]*)\)", part))
        results[names.split("(")[0].strip()] = "where" in comments or ", with" in part, sub
    return results


def _parts(text: str) -> Iterator[str]:
    """What is between the commas of the object that ``text`` begins with."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if depth == 0 or (depth == 1 and letter == ","):
            yield part.strip()
            part = ""
            if depth == 0:
                return
        elif depth > 1 or letter not in "{":
            part += letter


def unlike(said: Any, fields: Fields, where: str = "") -> list[str]:
    """What one side has and the other has not."""
    if isinstance(said, list):
        return [line for each in said for line in unlike(each, fields, where)]
    if not isinstance(said, dict):
        return [] if said is None else [f"{where} is {said!r}, no object"]
    results = [f"{where}{name} is not documented" for name in said.keys() - fields.keys()]
    results += [f"{where}{n} is not printed" for n, (optional, _) in fields.items() if n not in said and not optional]
    for name, (_, sub) in fields.items():
        if sub is not None and name in said:
            results += unlike(said[name], sub, f"{where}{name}.")
    return sorted(set(results))
