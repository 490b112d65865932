"""One thread for torch, no look at any hub, and no complaint about the warnings of other packages."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default:::transformers"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch").set_num_threads(1)
