"""How gradients are compressed before they travel: "bf16", "int8", "powersgd:rank=4", "topk:ratio=0.01"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, ClassVar

from elastune.core.errors import UserError
from elastune.core.options import Range, check, parse, split

NONE = "none"


@dataclass(frozen=True)
class Compression:
    """A way to send fewer bytes of each gradient. It is lossy, so it shows in the result.

    Attributes:
        name: How it is written.
        keeps_residual: Each worker keeps what it has not sent and adds it to its next gradient (error feedback).
    """

    name: ClassVar[str]
    keeps_residual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self.name, self)

    def __str__(self) -> str:
        told = ",".join(f"{option.name}={getattr(self, option.name):g}" for option in fields(self))
        return f"{self.name}:{told}" if told else self.name

    @staticmethod
    def parse(text: str) -> Compression | None:
        """Return the compression that ``text`` names; None for "none". Raises ``UserError`` for anything else.

        Example:
            >>> str(Compression.parse("powersgd"))
            'powersgd:rank=4'
        """
        name, options = split(text, "a compression", '"int8" or "powersgd:rank=4"')
        if name == NONE and not options:
            return None
        if name not in COMPRESSIONS:
            known = ", ".join([NONE, *COMPRESSIONS])
            raise UserError("a compression must be known", name[:40], f"use one of {known}")
        return parse(name, options, COMPRESSIONS[name])


@dataclass(frozen=True)
class BFloat16(Compression):
    """Sends two bytes a number, with the range of single precision and 8 bits of it."""

    name: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class Float16(Compression):
    """Sends two bytes a number, with 11 bits. Numbers beyond 65,504 become infinite, those below 6e-8 become zero."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class Int8(Compression):
    """Sends one byte a number, and four bytes for the scale of each block."""

    name: ClassVar[str] = "int8"


@dataclass(frozen=True)
class PowerSgd(Compression):
    """Sends matrices as products of two narrow ones (Vogels et al., NeurIPS 2019, arXiv 1905.13727).

    Args:
        rank: Columns of the narrow matrices.
    """

    name: ClassVar[str] = "powersgd"
    keeps_residual: ClassVar[bool] = True
    rank: Annotated[int, Range(1, 256)] = 4


@dataclass(frozen=True)
class TopK(Compression):
    """Sends only the largest numbers, with their places.

    Sources: Aji and Heafield, EMNLP 2017, arXiv 1704.05021; Stich et al., NeurIPS 2018, arXiv 1809.07599.

    Args:
        ratio: The part of all numbers that each worker sends.
    """

    name: ClassVar[str] = "topk"
    keeps_residual: ClassVar[bool] = True
    ratio: Annotated[float, Range(0, 1, open_low=True)] = 0.01


COMPRESSIONS: Mapping[str, type[Compression]] = MappingProxyType(
    {kind.name: kind for kind in (BFloat16, Float16, Int8, PowerSgd, TopK)}
)
"""By their names."""
