"""Traces of markets in files of the user's."""

from __future__ import annotations

from pathlib import Path

from elastune.core.cost import KINDS, ONE_PRICE, Prices, check_price
from elastune.core.errors import UserError
from elastune.plan.traces import Availability, parse_availability, parse_prices

LARGEST_BYTES = 1 << 26


def read_prices(path: Path) -> Prices:
    """The prices in a file. Raises ``UserError``."""
    return parse_prices(_text(path), str(path))


def read_host_prices(path: Path, kind: str, *, told: bool) -> Prices:
    """The prices in a file, for hosts of which those that do not tell their kind are of this ``kind``.

    ``told``: hosts may tell any kind, so each needs a price. Raises ``UserError``.
    """
    found = read_prices(path).assuming(kind)
    for each in KINDS if told else ():
        found.at(each, 0.0)
    return found


def prices_of(price: float | None, file: Path | None, kind: str, *, told: bool) -> Prices | None:
    """What a worker-hour costs: one ``price``, or the prices in a ``file`` (``kind``, ``told``: see
    ``read_host_prices``); None where neither is given. Raises ``UserError``."""
    if price is None:
        return None if file is None else read_host_prices(file, kind, told=told)
    if file is not None:
        raise UserError(ONE_PRICE, "both a price and a file of prices", "leave one of them out")
    return Prices.constant(check_price(price))


def read_availability(path: Path) -> Availability:
    """The offer in a file. Raises ``UserError``."""
    return parse_availability(_text(path), str(path))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("a trace must be a readable text file", f"{path}: {error}", "see docs/spot.md") from None
    if len(data) > LARGEST_BYTES:
        raise UserError("a trace is at most 64 MiB long", path, "thin it out")
    return text
