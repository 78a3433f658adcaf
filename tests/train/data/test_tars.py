"""Whose fault it is where a part of a sample is not found."""

from __future__ import annotations

import pytest

from elastune.train.data.stream import KEY, URL, damaged_tar


@pytest.mark.parametrize("said", ["dog", 7])
def test_what_a_sample_says_and_a_table_does_not_have_is_no_fault_of_the_file(said: object) -> None:
    sample, table = {URL: "a.tar", KEY: "0001", "cls": said}, dict[object, int]()
    with pytest.raises(KeyError) as raised:
        table[sample["cls"]]
    assert damaged_tar(raised.value) is None
    with pytest.raises(KeyError) as raised:
        sample["jpg"]
    assert "sample 0001 has cls, and no jpg" in str(damaged_tar(raised.value))
