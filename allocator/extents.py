"""Extents: flat lists of integers slot, length, slot, length, ..., in order of the positions they hold."""

from __future__ import annotations

from kvslot.allocator.results import Copy


def append(extents: list[int], slot: int, length: int) -> None:
    if extents and extents[-2] + extents[-1] == slot:
        extents[-1] += length
    else:
        extents += (slot, length)


def join(extents: list[int], more: list[int]) -> None:
    """Appends `more` to `extents`; the two become one extent where they touch."""
    if extents and more and extents[-2] + extents[-1] == more[0]:
        extents[-1] += more[1]
        extents += more[2:]
    else:
        extents += more


def joined(extents: list[int]) -> list[int]:
    """The same slots, neighbours that touch made one: pages are found by where an extent begins."""
    out = extents[:2]
    for i in range(2, len(extents), 2):
        if out[-2] + out[-1] == extents[i]:
            out[-1] += extents[i + 1]
        else:
            out += extents[i : i + 2]
    return out


def split_extents(extents: list[int], at: int) -> tuple[list[int], list[int]]:
    """Splits a flat extent list after `at` slots (more than 0, fewer than all)."""
    for i in range(1, len(extents), 2):
        n = extents[i]
        if at < n:
            if not at:
                return extents[: i - 1], extents[i - 1 :]
            front = extents[: i + 1]
            front[i] = at
            back = extents[i - 1 :]
            back[0] += at
            back[1] -= at
            return front, back
        at -= n
    return extents, []


def cut(extents: list[int], at: int, length: int) -> list[int]:
    """The `length` slots behind the first `at`."""
    out: list[int] = []
    for i in range(0, len(extents), 2):
        n = extents[i + 1]
        if at >= n:
            at -= n
            continue
        if not length:
            break
        got = min(n - at, length)
        out += (extents[i] + at, got)
        length -= got
        at = 0
    return out


def copies_of(extents: list[int], start: int, length: int, target: int) -> list[Copy]:
    """Copies of positions [start, start + length) of a table to the slots from `target` on."""
    copies = []
    position = 0
    for i in range(0, len(extents), 2):
        low, high = max(position, start), min(position + extents[i + 1], start + length)
        if low < high:
            copies.append(Copy(extents[i] + low - position, target + low - start, high - low))
        position += extents[i + 1]
    return copies
