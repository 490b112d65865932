"""The tiny policy under its name, with an empty log for each test."""

from collections.abc import Iterator

import pytest

from kvslot.replay import policies

from .tiny import TinyPolicy


@pytest.fixture(autouse=True)
def _tiny() -> Iterator[None]:
    policies.register("tiny", TinyPolicy)
    TinyPolicy.log = []
    TinyPolicy.engines = set()
    yield
    policies.unregister("tiny")
