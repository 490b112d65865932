"""Thousands of seeded histories; a failure names its seed and the command that replays it.

KVSLOT_SEEDS=n runs n seeds of each kind instead (`make fuzz` looks for longer, on fresh seeds).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = int(os.environ.get("KVSLOT_SEEDS", "2000"))
MOVES_SHARE = 10  # histories of moves are larger: one for so many of the others
PROCESSES = 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_history_goes_wrong() -> None:
    """No order of allocations, steps, deaths, moves and refusals loses, tears or invents a byte, or starves anybody."""
    command = [sys.executable, "-I", str(Path(__file__).parent), "--keep-going"]
    told: list[str] = []
    for kinds, seeds in ((("chaos", "load"), SEEDS), (("moves",), SEEDS // MOVES_SHARE)):
        shares = [f"{seeds * i // PROCESSES}:{seeds * (i + 1) // PROCESSES}" for i in range(PROCESSES)]
        running = [
            subprocess.Popen(
                [*command, "--seeds", share, "--kind", *kinds], stdout=subprocess.PIPE, text=True
            )
            for share in shares
        ]
        told += [process.communicate()[0] for process in running]
        assert [process.returncode for process in running] == [0] * PROCESSES, "\n".join(told)
    counts = " ".join(told)
    # A search that never got anywhere proves nothing.
    for word in (
        "moves published",
        "planned",
        "told",
        "epochs applied",
        "preempted",
        "resumed",
        "hit",
        "duplicated",
        "grown peeled",
        "later run",
        "forked",
    ):
        assert word in counts, f"no history had: {word}"
