"""Histories that went wrong once, by their seeds."""

import pytest

from .histories import KINDS

FOUND = [
    pytest.param("chaos", 918273502, id="a page request evicted for what a ticket's window then took"),
    pytest.param("chaos", 918277042, id="free slots of a block in use were counted as whole blocks"),
    pytest.param("chaos", 918276087, id="a long leaf loses as much as leaves the headroom"),
    pytest.param("moves", 918275645, id="a child was forked over copies that were still to be made"),
]


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_they_go_right_now(kind: str, seed: int) -> None:
    """Each of these broke a rule, in the core or in what the simulation took for one."""
    KINDS[kind](seed)
