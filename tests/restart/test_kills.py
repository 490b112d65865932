"""A daemon killed again and again, under engines that look at every byte (long form: python -m tests.restart)."""

from .killing import ENGINES, kill_under_load


def test_nothing_wrong_is_served_over_twenty_kills() -> None:
    """After each kill what was cached is cached with the same bytes, and what engines held is theirs until released."""
    acts, returns, strange = kill_under_load(20, 1)
    assert acts > 0
    assert returns >= 10 * ENGINES
    assert not strange, "a session of a killed daemon was not known to the next one"
