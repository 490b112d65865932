"""A daemon killed again and again, under engines that look at every byte (long form: python -m tests.restart)."""

from .killing import ENGINES, kill_under_load


def test_nothing_wrong_is_served_over_twenty_kills() -> None:
    """What was cached is cached with the same bytes after each kill, and engines go on with what is theirs."""
    seen = kill_under_load(20, 1)
    assert seen.acts > 0
    assert seen.returns >= 10 * ENGINES
    assert not seen.strange, "a session of a killed daemon was not known to the next one"
    assert seen.gone_on, "no sequence went on where it stood"
