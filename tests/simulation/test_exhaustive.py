"""All histories of a pool of three blocks and two engines, to the depths stated here (KVSLOT_DEEPER=n adds n)."""

import os

import pytest

from .exhaustive import ALPHABETS, Tiny, alphabet, explore

DEEPER = int(os.environ.get("KVSLOT_DEEPER", "0"))

# block size, append, opaque, acts, depth
CASES = [
    (4, "chain", False, "sharing", 5),
    (4, "chain", False, "fences", 5),
    (4, "peel", False, "deaths", 4),
    (2, "peel", False, "sharing", 5),
    (2, "chain", False, "deaths", 5),
    (2, "chain", True, "sharing", 5),
    (2, "chain", True, "fences", 6),
]


@pytest.mark.slow
@pytest.mark.timeout(3600 if DEEPER else 600)
@pytest.mark.parametrize(("block_size", "append", "opaque", "acts", "depth"), CASES)
def test_every_history_is_sound(block_size: int, append: str, opaque: bool, acts: str, depth: int) -> None:
    """Whatever two engines do, in any order, every state they reach agrees with twin, shadow, paint and audit."""
    states = 0
    tried = 0
    levels = explore(lambda: Tiny(block_size, append, opaque), alphabet(ALPHABETS[acts]), depth + DEEPER)
    for level, found, attempts in levels:
        states += found
        tried += attempts
        print(f"depth {level}: {found} new states, {attempts} acts tried")
    assert states > 50 * depth
    assert tried > states
