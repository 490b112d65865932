"""What happened between two looks at a daemon: the rows of `kvslotctl top`.

A look is a handful of Inspect requests, some milliseconds apart; `measure` takes the later from the earlier one.
Counters only rise while a daemon lives, so looks at two daemons, before a restart and after it, are not compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvslot.api.client import Control

Row = dict[str, Any]

COUNTED: Final = ("prompt_tokens", "hit_tokens", "evicted_tokens", "moved_tokens", "copied_tokens")
"""Of a pool, that become a rate a second, named `..._s`."""
HELD: Final = (
    "pool", "block_size", "usable", "free", "cached", "private", "evictable", "leased", "pinned", "fenced", "moving",
    "reserved", "quarantined", "blocks", "blocks_free", "largest_free_run", "nodes", "sequences", "sessions", "tickets",
)  # fmt: skip
"""Of a pool, as they are."""
WORK: Final = ("Allocate", "Extend", "Commit", "Fork", "Trim", "Free")
"""What engines ask for while they serve: the sum that `verbs_s` is."""


@dataclass
class Look:
    """One look, on this machine's monotonic clock."""

    at: float
    time: float  # seconds since 1970
    status: Row
    pools: list[Row]
    sessions: list[Row]
    verbs: dict[str, Row]
    steps: dict[str, list[int]]  # of "all", by verb: how many took less than 2^k ns
    compaction: dict[str, Row]


def look(control: Control, pool: str = "") -> Look:
    """What there is now; `pool` "" is all of them."""
    at = time.monotonic()
    (status,) = control.inspect("status")
    return Look(
        at=at,
        time=time.time(),
        status=status,
        pools=list(control.inspect("pools", pool=pool)),
        sessions=list(control.inspect("sessions", pool=pool)),
        verbs={row["verb"]: row for row in control.inspect("latency")},
        steps={row["verb"]: row["classes"] for row in _steps(control) if row["step"] == "all"},
        compaction={row["pool"]: row for row in control.inspect("defrag", pool=pool)},
    )


def _steps(control: Control) -> list[Row]:
    from kvslot.api.client import NotFound

    try:
        return list(control.inspect("steps"))
    except NotFound:
        return []  # a daemon of before


def same_daemon(before: Look, after: Look) -> bool:
    """Whether the two can be compared."""
    return bool(before.status["boot"] == after.status["boot"] and after.at > before.at)


def measure(before: Look, after: Look) -> Row:
    """Rates between the two, and what is held at the later one: plain values, the keys of `top --json`.

    Percentiles are of the times that were sampled between the two; None where there were none.
    """
    seconds = after.at - before.at
    earlier = {row["pool"]: row for row in before.pools}
    pools = []
    for row in after.pools:
        then = earlier.get(row["pool"], row)
        told = {name: row[name] for name in HELD}
        told["used_pct"] = 100 * (row["usable"] - row["free"]) / row["usable"] if row["usable"] else 0.0
        for name in COUNTED:
            told[f"{name}_s"] = max(0, row[name] - then[name]) / seconds
        asked = row["prompt_tokens"] - then["prompt_tokens"]
        told["hit_pct"] = 100 * (row["hit_tokens"] - then["hit_tokens"]) / asked if asked > 0 else None
        compaction = after.compaction.get(row["pool"], {})
        told["compaction"] = compaction.get("state", "")
        told["unpacked_pct"] = compaction.get("unpacked_pct", 0.0)
        pools.append(told)
    verbs = _verbs(before, after, seconds)
    frames = {row["session"]: row["frames"] for row in before.sessions}
    sessions = [
        {**row, "frames_s": max(0, row["frames"] - frames.get(row["session"], row["frames"])) / seconds}
        for row in after.sessions
    ]
    return {
        "seconds": seconds,
        "status": after.status,
        "verbs_s": sum(row["per_s"] for row in verbs if row["verb"] in WORK),
        "refused_s": sum(row["refused_s"] for row in verbs),
        "pools": pools,
        "verbs": verbs,
        "sessions": sessions,
    }


def _verbs(before: Look, after: Look, seconds: float) -> list[Row]:
    found = []
    for verb, row in after.verbs.items():
        then = before.verbs.get(verb, {})
        classes = list(after.steps.get(verb, ()))
        for place, count in enumerate(before.steps.get(verb, ())):
            classes[place] -= count
        found.append(
            {
                "verb": verb,
                "count": row["count"],
                "per_s": (row["count"] - then.get("count", 0)) / seconds,
                "refused_s": (row.get("refused", 0) - then.get("refused", 0)) / seconds,
                "us_p50": percentile(classes, 0.5),
                "us_p99": percentile(classes, 0.99),
            }
        )
    return found


def percentile(classes: list[int], share: float) -> float | None:
    """Microseconds that so many of the times stay below: the upper edge of a class, so good to a factor of two."""
    whole = sum(classes)
    left = share * whole
    for power, count in enumerate(classes):
        left -= count
        if count and left <= 0:
            return (1 << power) / 1e3
    return None
