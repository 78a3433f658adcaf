"""With whose weights a training begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError


@dataclass(frozen=True)
class StartFrom:
    """What is taken of another model's weights.

    Attributes:
        source: The folder of a run or a trial, whose newest checkpoint is read, or a safetensors file.
        rename: Of a tensor's name there the beginning, and what stands for it here; of several that fit, the first.
        fresh: Names here that keep their initial values, with ``*`` for anything, such as "head.*".
        sha256: What the source must have, for all trials of a study to begin alike; "" for whatever it has.
    """

    source: Path
    rename: tuple[tuple[str, str], ...] = ()
    fresh: tuple[str, ...] = ()
    sha256: str = ""

    def renamed(self, name: str) -> str:
        """What the source's ``name`` is called here."""
        for begins, instead in self.rename:
            if name.startswith(begins):
                return instead + name[len(begins) :]
        return name

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rename = [list(pair) for pair in self.rename]
        return {"source": str(self.source), "rename": rename, "fresh": list(self.fresh), "sha256": self.sha256}

    @classmethod
    def from_json(cls, told: Any) -> StartFrom:
        """What ``to_json`` gave. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        rename = tuple((str(begins), str(instead)) for begins, instead in told["rename"])
        return cls(Path(told["source"]), rename, tuple(map(str, told["fresh"])), str(told["sha256"]))


def parse_renames(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Of "backbone.=encoder.", as ``--rename`` has it. Raises ``UserError``."""
    found = []
    for text in texts:
        begins, equals, instead = text.partition("=")
        if not equals or "=" in instead:
            raise UserError("a rename is THERE=HERE, the beginnings of names", repr(text)[:80], "backbone.=encoder.")
        found.append((begins, instead))
    return tuple(found)
