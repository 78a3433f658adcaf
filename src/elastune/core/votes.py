"""Do all workers decide alike? Decisions as small whole numbers that add up exactly in a step's reduction.

Every worker adds its vote; all read the same sums. Equal votes are then known to be equal, and what they say is known
even to a worker that had no vote (it had no samples of the step).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import fields
from hashlib import blake2b

from elastune.core.errors import UserError
from elastune.core.mesh import AXES, Mesh
from elastune.core.signals import Decision
from elastune.core.topology import Topology

MOST_VOTERS = 256  # sums of this many digits, and of this many squared marks, are exact in single precision
_DIGIT = 1 << 16
_MARKS = (251, 241, 239)  # moduli of the checks; a mark's square must stay below 2^24 / MOST_VOTERS
_FLAGS = ("correct_momentum", "remember", "restore", "stop")
_COUNTS = ("workers", "replace_rank", "batch_size", "micro_batch", "ramp_steps")  # whole numbers, nothing as 0
_REALS = ("lr", "lr_factor")
_MESHES = ("mesh",)
_TEXTS = {"sync": 192, "topology": 128}  # bytes: no strategy with all its settings is longer, lists of parents can be
_NOTHING = Decision()
assert {*_FLAGS, *_COUNTS, *_REALS, *_MESHES, *_TEXTS} == {f.name for f in fields(Decision)}


def vote(decision: Decision) -> list[float]:
    """One worker's part of the sums, of ``VOTE`` numbers."""
    digits = _digits(decision)
    marks = _marks(digits)
    return [float(x) for x in (*digits, *marks, *(mark * mark for mark in marks))]


def voted(topology: Topology) -> str:
    """``topology`` as a decision has it. Raises ``UserError`` where a vote has no room for it."""
    if len(str(topology).encode()) > _TEXTS["topology"]:
        rule = f"a list of parents that workers vote on has at most {_TEXTS['topology']} characters"
        raise UserError(rule, f"{len(topology.parents)} parents", "use a shape by its name, or --topology")
    return str(topology)


def outcome(sums: Sequence[float], voters: int) -> Decision | None:
    """What all ``voters`` decided, from the sums of their votes; None where they did not decide alike."""
    ends = _LENGTH, _LENGTH + len(_MARKS)
    digits, marks, squares = sums[: ends[0]], sums[ends[0] : ends[1]], sums[ends[1] :]
    # By Cauchy and Schwarz: n times the sum of squares is the square of the sum only where all are equal.
    if any(voters * square != mark * mark for mark, square in zip(marks, squares, strict=True)):
        return None
    shares = [digit / voters for digit in digits]
    if any(share != int(share) or not 0 <= share < _DIGIT for share in shares):
        return None
    return _decision([int(share) for share in shares])


def _digits(decision: Decision) -> list[int]:
    digits = [sum(1 << i for i, name in enumerate(_FLAGS) if getattr(decision, name))]
    for name in _COUNTS:
        value = getattr(decision, name)
        number = 0 if value == getattr(_NOTHING, name) else value + 1
        if not 0 <= number < _DIGIT * _DIGIT:
            raise ValueError(f"{name} {value} is out of bounds")
        digits += divmod(number, _DIGIT)
    for name in _REALS:
        value = getattr(decision, name)
        digits += [0] * 5 if value is None else [1, *struct.unpack("<4H", struct.pack("<d", value))]
    for name in _MESHES:
        value = getattr(decision, name)
        digits += [0] * len(AXES) if value is None else [Mesh.parse(value).size(axis) for axis in AXES]
    for name, longest in _TEXTS.items():
        text = (getattr(decision, name) or "").encode()
        if len(text) > longest:
            raise ValueError(f"{name} is longer than {longest} bytes")
        digits += struct.unpack(f"<{longest // 2}H", text.ljust(longest, b"\0"))
    return digits


def _decision(digits: list[int]) -> Decision:
    read: Iterator[int] = iter(digits)
    flags = next(read)
    found: dict[str, bool | int | float | str | None] = {name: bool(flags & 1 << i) for i, name in enumerate(_FLAGS)}
    for name in _COUNTS:
        number = next(read) * _DIGIT + next(read)
        found[name] = getattr(_NOTHING, name) if number == 0 else number - 1
    for name in _REALS:
        known, *parts = (next(read) for _ in range(5))
        found[name] = struct.unpack("<d", struct.pack("<4H", *parts))[0] if known else None
    for name in _MESHES:
        sizes = dict(zip(AXES, (next(read) for _ in AXES), strict=True))
        found[name] = str(Mesh(**sizes)) if all(sizes.values()) else None
    for name, longest in _TEXTS.items():
        packed = struct.pack(f"<{longest // 2}H", *(next(read) for _ in range(longest // 2)))
        found[name] = packed.rstrip(b"\0").decode(errors="replace") or None
    return Decision(**found)  # type: ignore[arg-type]


def _marks(digits: Sequence[int]) -> list[int]:
    """Zeros for an empty decision, else numbers from 1 on that are hardly ever all equal for different ones."""
    if not any(digits):
        return [0] * len(_MARKS)
    hashed = int.from_bytes(blake2b(struct.pack(f"<{len(digits)}H", *digits), digest_size=8).digest(), "big")
    return [1 + hashed % (modulus - 1) for modulus in _MARKS]


_LENGTH = len(_digits(_NOTHING))
VOTE = len(vote(_NOTHING))
