"""How compressions are written."""

from __future__ import annotations

import pytest

from elastune.core.communication import COMPRESSIONS, Compression, PowerSgd, TopK
from elastune.core.errors import UserError


def test_what_is_written_is_read() -> None:
    assert Compression.parse("none") is None
    assert Compression.parse("powersgd:rank=2") == PowerSgd(2)
    assert Compression.parse("topk") == TopK(0.01)
    for name in COMPRESSIONS:
        parsed = Compression.parse(name)
        assert parsed is not None
        assert Compression.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "zip", "none:rank=2", "int8:rank=2", "powersgd:rank=0", "powersgd:rank=1.5", "topk:ratio=nan", "topk:ratio=2"],
)
def test_what_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as error:
        Compression.parse(text)
    assert "\n" not in str(error.value)
