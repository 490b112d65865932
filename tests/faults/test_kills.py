"""kill -9 of a client at every frame's boundary and inside each verb's frame (S31; every byte by `make fuzz`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..tools.daemon import running
from .actors import empty
from .killing import CUTS, STEPS, Witness


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    with running() as daemon:
        witness = Witness(daemon)
        yield witness
        witness.close()
        empty(daemon)


@pytest.mark.parametrize("last", range(len(STEPS)), ids=list(STEPS))
def test_S31_killed_inside_a_verb(witness: Witness, last: int) -> None:
    """Audit clean, the one who waited served, painted contents right, the half-made entry in nobody's way."""
    for cut in range(CUTS + 2):
        witness.kill(last, cut)
