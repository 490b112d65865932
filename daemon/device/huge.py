"""Huge pages for a pool's memory: 2 MiB or 1 GiB each, set aside by the operator beforehand.

The kernel keeps them apart from other memory: `nr_hugepages` of a size says how many there are, and nothing else can
use them.  A memfd of huge pages is as large as whole pages; what is mapped and unmapped is whole pages too.  A table
entry covers 512 times as much (or 262,144 times), so that engines that read all over a large pool miss the TLB less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

SIZES: Final = {"off": 0, "2MiB": 2 << 20, "1GiB": 1 << 30}
"""Bytes of a page, by the setting's word; 0: the system's ordinary pages."""

MFD_HUGETLB: Final = 0x0004
MFD_HUGE_SHIFT: Final = 26


def flags_of(page_bytes: int) -> int:
    """What memfd_create is told for pages of this size."""
    return MFD_HUGETLB | (page_bytes.bit_length() - 1) << MFD_HUGE_SHIFT if page_bytes else 0


def whole(size: int, page_bytes: int) -> int:
    """The size in whole pages."""
    return size + -size % page_bytes if page_bytes else size


def count(page_bytes: int, kernel: Path = Path("/sys/kernel/mm/hugepages")) -> tuple[int, int]:
    """(pages there are, pages that can be taken now) of a size; (0, 0) where the kernel has none of it."""
    folder = kernel / f"hugepages-{page_bytes >> 10}kB"
    try:
        total, free, promised = (
            int((folder / name).read_text(encoding="ascii"))
            for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0, 0
    return total, max(0, free - promised)


def shortage(name: str, size: int, page_bytes: int, kernel: Path = Path("/sys/kernel/mm/hugepages")) -> str:
    """Why a pool's memory cannot be had in huge pages, and what to do about it; "" where it can."""
    wanted = whole(size, page_bytes) // page_bytes
    folder = kernel / f"hugepages-{page_bytes >> 10}kB"
    word = next(word for word, each in SIZES.items() if each == page_bytes)
    if not folder.is_dir():
        return (
            f"pool {name!r} wants huge pages of {word}, and this kernel has none of that size: set huge_pages to "
            'another size, or to "off"'
        )
    total, free = count(page_bytes, kernel)
    if wanted <= free:
        return ""
    least = total - free + wanted
    return (
        f"pool {name!r} wants {wanted} huge pages of {word}, and {free} of {total} are free: set {least} or more aside "
        f"(echo {least} > {folder}/nr_hugepages, at best soon after boot, while memory is in one piece), or set "
        'huge_pages = "off"'
    )


__all__ = ["SIZES", "count", "flags_of", "shortage", "whole"]
