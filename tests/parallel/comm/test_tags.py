"""Each kind of traffic has a tag of its own."""

from __future__ import annotations

from elastune.parallel.comm import group as tags


def test_no_two_kinds_of_messages_share_a_tag() -> None:
    numbers = {name: value for name, value in vars(tags).items() if name.endswith("_TAG")}
    assert len(numbers) > 3
    assert len(set(numbers.values())) == len(numbers), numbers
    assert max(numbers.values()) == tags.FIRST_ROUTE_TAG, "routes take the numbers from there on"
