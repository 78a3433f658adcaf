"""One line of a journal: a record and when it was written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastune.journal.records import Record, decode, encode
from elastune.journal.values import check_at

OPENING = b'{"at":'
_STAMP = re.compile(rb'\s*\{\s*"at"\s*:\s*(-?\d[\d.eE+-]*)\s*,')


@dataclass(frozen=True)
class Entry:
    """``record``, written ``at`` seconds since the epoch."""

    at: float
    record: Record


def encode_entry(entry: Entry) -> bytes:
    """The record's JSON with a leading key ``at``, without its line end. Times are real, in microseconds, or simulated:
    these keep all their digits, as a simulation goes on from them."""
    at = f"{entry.at:.6f}"
    return b"%s%s,%s" % (OPENING, (at if float(at) == entry.at else repr(entry.at)).encode(), encode(entry.record)[1:])


def decode_entry(line: bytes) -> Entry:
    """The entry in ``line``. Raises ``ValueError`` where it is none."""
    stamp = _STAMP.match(line)
    if stamp is None:
        raise ValueError('a line must be a JSON object that starts with "at"')
    return Entry(check_at(float(stamp[1])), decode(b"{" + line[stamp.end() :]))
