"""What values of a record may be: a journal is read years later, elsewhere, by programs that reckon with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from elastune.core.text import printable

EXACT = 2**53  # up to here every whole number is a float, too
LAST_AT = 253_402_214_400.0  # 9999-12-31 in seconds since 1970: calendars go no further

Count = Annotated[int, Field(ge=0, le=EXACT)]
Number = Annotated[int, Field(ge=-1, le=EXACT)]
"""Of a trial; -1 stands for one of another study."""
Words = Annotated[str, AfterValidator(printable)]
"""A reason, an error: names and texts of the user's may be in it, and people read it on a terminal."""
Whole = Annotated[int, Field(ge=-(2**64), le=2**64)]
"""A seed, an exit code, a rank: not to be reckoned with."""


def _having(kinds: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Leaves a dict as it is, once those of its values that ``kinds`` names are of their kinds."""
    adapters = {name: TypeAdapter(kind) for name, kind in kinds.items()}

    def check(values: dict[str, Any]) -> dict[str, Any]:
        for name in adapters.keys() & values.keys():
            try:
                adapters[name].validate_python(values[name])
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                raise ValueError(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}") from None
        return values

    return check


MeansUsed = Annotated[
    dict[str, Any],
    AfterValidator(
        _having({"workers": Count, "mechanism": str, "mesh": str | None, "sync": str, "sync_schedule": str})
    ),
]
"""The fields of ``core.run.Means``, and what else decided how a training was run."""

Settings = Annotated[
    dict[str, Any],
    AfterValidator(
        _having(
            {
                "kind": Literal["tune", "frontier"],
                "program": str | dict[str, str],
                "data": str | None,
                "objectives": dict[str, Literal["max", "min"]],
                "workers": Count | list[Count],
                "trial_workers": tuple[Count, Count] | None,
                "seed": Whole,
                "epochs": Count | None,
                "stopping": str,
                "allocation": str,
                "means": MeansUsed,
                "defaults": dict[str, Any],
                "target": float | str | None,  # of a frontier the quality, of a study a comparison
                "until": list[str] | tuple[str, ...],
                "patience": Count | None,
                "divergence": float | None,
                "prices": str | None,
                "price_per_worker_hour": Annotated[float, Field(gt=0, le=1e15)],
            }
        )
    ),
]
"""What a study was asked: more than these keys, and not all of them."""


def check_at(at: float) -> float:
    """Seconds since 1970 that a calendar has. Raises ``ValueError`` for others."""
    if not 0 <= at <= LAST_AT:
        raise ValueError(f"at: must be from 0 to {LAST_AT:.0f} seconds since 1970")
    return at
