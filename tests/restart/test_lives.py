"""Client libraries on a pool whose daemon is killed at any moment (long form: python -m tests.restart.lives)."""

import pytest

from .lives import live


@pytest.mark.parametrize("seed", [1, 3])
def test_what_goes_on_reads_as_it_was_computed(seed: int) -> None:
    """Over kills, lost answers and kills on the way back: no byte is another's, and in the end nothing is held."""
    done = live(seed, [{"blocks": 64, "scrub": seed == 3}])
    assert {"went on", "stepped"} <= set(done), done
