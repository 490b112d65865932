"""Six engines that do whatever comes to their minds, killed and stopped at any moment: every byte read is right."""

from __future__ import annotations

import pytest

from .soaking import soak

SECONDS = 4.0


@pytest.mark.parametrize(("seed", "append"), [(1, "chain"), (2, "peel")])
def test_engines_that_do_anything_and_die_at_any_moment(seed: int, append: str) -> None:
    """Audit clean all along and nothing held at the end; what an engine reads wrongly it says, and the test fails."""
    assert soak(seed, SECONDS, append=append) > 20
