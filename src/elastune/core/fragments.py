"""How a model is cut into fragments, and after which steps of a round each of them is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.errors import UserError


def fragments_of(sizes_bytes: Sequence[int], count: int) -> list[list[int]]:
    """Whole tensors in ``count`` fragments of nearly equal bytes: the largest one first, each to the lightest fragment.

    Neither runs of layers nor strides through them: tensors differ in size by orders of magnitude, and the largest
    burst is what fragments are to make small. The same on every worker.

    Args:
        sizes_bytes: By tensor.

    Returns:
        The places of each fragment's tensors, in order.

    Raises:
        UserError: Where there are fewer tensors than fragments.
    """
    if len(sizes_bytes) < count:
        told = f"fragments={count}, {len(sizes_bytes)} parameters"
        raise UserError("each fragment must have a parameter tensor", told, "use fewer fragments")
    found: list[list[int]] = [[] for _ in range(count)]
    weights = [0] * count
    for place in sorted(range(len(sizes_bytes)), key=lambda place: (-sizes_bytes[place], place)):
        # Beside bytes their number: tensors without elements, too, are spread, so that no fragment is empty.
        lightest = min(range(count), key=lambda each: (weights[each], len(found[each]), each))
        found[lightest].append(place)
        weights[lightest] += sizes_bytes[place]
    return [sorted(places) for places in found]


def sendings(every: int, fragments: int, cycles: int) -> dict[int, int]:
    """Which fragment leaves after how many steps of a round of ``every``, each of them ``cycles`` times.

    Evenly staggered, in turn; the last one is not among them: at the round's end all are exchanged.

    Example:
        >>> sendings(200, 4, 1)
        {50: 0, 100: 1, 150: 2}
    """
    sent = cycles * fragments
    return {(turn + 1) * every // sent: turn % fragments for turn in range(sent - 1)}
