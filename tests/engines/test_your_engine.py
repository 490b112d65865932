"""examples/adapter.py and docs/integrations/your-engine.md: the same words whatever pool, page and daemon do."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvslot.api import client as face
from kvslot.api.client import Control
from kvslot.api.wire import Disconnected
from kvslot.engines import fingerprint

from ..tools.daemon import Running, running

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "examples" / "adapter.py").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "integrations" / "your-engine.md").read_text(encoding="utf-8")
WORDS = "Once upon a time there was a king who had a daughter, and she had a golden ball"
PROMPTS = [WORDS[: 20 + 7 * (n % 9)] + " " * (n % 3) + str(n % 4) for n in range(24)]
POOL: dict[str, Any] = {"layout": {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}}


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_adapter", ROOT / "examples" / "adapter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_adapter"] = module
    spec.loader.exec_module(module)
    return module


def answers(
    example: Any, engine: Any, count: int = 40, prompts: list[str] = PROMPTS
) -> tuple[list[str], int]:
    """What it says to all prompts, and how many tokens were cached."""
    requests = [example.Request(each.encode(), count) for each in prompts]
    engine.run(requests)
    return [bytes(each.answer).decode() for each in requests], sum(each.hits for each in requests)


@pytest.fixture(scope="module")
def want(example: Any) -> list[str]:
    """What is said where everything fits, one after the other, and nothing is ever found."""
    with running(pools=[{**POOL, "blocks": 513}]) as daemon:
        said = []
        for number, prompt in enumerate(PROMPTS):
            engine = example.Engine(str(daemon.socket), page=1, tenant=str(number), batch=1)
            said += answers(example, engine, prompts=[prompt])[0]
            engine.close()
        return said


def sound(daemon: Running) -> None:
    with Control(str(daemon.socket)) as control:
        assert not control.audit().faults
        (row,) = control.inspect("pools")
        assert row["private"] == row["fenced"] == 0


@pytest.mark.parametrize("append", ["chain", "peel"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_any_page_and_append(example: Any, want: list[str], page: int, append: str) -> None:
    """Pages and copies: the words are the same, cold and warm, and two engines find one another's work."""
    with running(pools=[{**POOL, "blocks": 257}]) as daemon:
        one = example.Engine(str(daemon.socket), page=page, append=append)
        two = example.Engine(str(daemon.socket), page=page, append=append)
        first, cold = answers(example, one)
        second, warm = answers(example, two)
        assert first == second == want
        assert warm > cold
        assert warm > 20 * len(PROMPTS)
        one.close()
        two.close()
        sound(daemon)


@pytest.mark.parametrize("page", [1, 16])
def test_memory_runs_short(example: Any, want: list[str], page: int) -> None:
    """A pool for two of eight running requests: those that must wait or give way come to the same words."""
    settings = {
        "reclaim_patience_ms": 2,
        "fence_patience_ms": 2,
        "preempt_deadline_ms": 200,
        "watermark": 0.0,
    }
    with running(pools=[{**POOL, "blocks": 17, **settings}]) as daemon:
        engine = example.Engine(str(daemon.socket), page=page)
        assert answers(example, engine)[0] == want
        engine.close()
        sound(daemon)


def test_a_connection_that_is_lost(example: Any, want: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken up again in the middle of everything, several times."""
    with running(pools=[{**POOL, "blocks": 257}]) as daemon:
        engine = example.Engine(str(daemon.socket), page=16)
        steps = [0]
        step = engine.step

        def cut() -> None:
            steps[0] += 1
            if steps[0] % 17 == 0:
                engine.client._connection._socket.shutdown(2)
            step()

        monkeypatch.setattr(engine, "step", cut)
        assert answers(example, engine)[0] == want
        assert steps[0] > 40
        engine.close()
        sound(daemon)


def test_another_daemon(
    example: Any, want: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle, and started anew: everything that ran is computed again, and right."""
    socket = tmp_path / "s"
    with running(pools=[{**POOL, "blocks": 257}], socket=socket, code=None) as daemon:
        engine = example.Engine(str(socket), page=16)
        steps = [0]
        step, recover = engine.step, engine.recover
        there: list[Any] = []

        def kill() -> None:
            steps[0] += 1
            if steps[0] == 20:
                daemon.process.kill()
                daemon.process.wait()
            step()

        def start() -> None:
            if not there:
                there.append(running(pools=[{**POOL, "blocks": 257}], socket=socket))
                there[0].__enter__()
            recover()

        monkeypatch.setattr(engine, "step", kill)
        monkeypatch.setattr(engine, "recover", start)
        try:
            assert answers(example, engine)[0] == want
            assert there
            engine.close()
        finally:
            for each in there:
                each.__exit__(None, None, None)


def test_a_daemon_that_is_away_for_a_moment(
    example: Any, want: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, and back a second later: the engine waits for it, but not for ever."""
    socket = tmp_path / "s"
    with running(pools=[{**POOL, "blocks": 257}], socket=socket, code=None) as daemon:
        engine = example.Engine(str(socket), page=16)
        steps = [0]
        there: list[Running] = []
        step = engine.step

        def kill() -> None:
            steps[0] += 1
            if steps[0] in (20, 100_000):
                (there[-1] if there else daemon).process.kill()
                (there[-1] if there else daemon).process.wait()
            step()

        with contextlib.ExitStack() as stack:
            naps: list[float] = []

            def nap(seconds: float) -> None:
                naps.append(seconds)
                if len(naps) == 4:
                    there.append(
                        stack.enter_context(
                            running(pools=[{**POOL, "blocks": 257}], socket=socket, code=None)
                        )
                    )
                time.sleep(seconds)

            monkeypatch.setattr(engine, "step", kill)
            monkeypatch.setattr(example, "time", SimpleNamespace(monotonic=time.monotonic, sleep=nap))
            engine.patience = 20.0
            half = len(PROMPTS) // 2
            assert answers(example, engine, prompts=PROMPTS[:half])[0] == want[:half]
            assert len(naps) >= 4
            count = len(naps)
            engine.patience = 0.3
            steps[0] = 99_999
            with pytest.raises(Disconnected):
                answers(example, engine, prompts=PROMPTS[half:])
            assert len(naps) > count + 2
            engine.close()


def test_the_page_shows_the_example() -> None:
    """Every piece of code on the page is the example's, marked there; every name on the page is there."""
    pieces = dict(re.findall(r"^    # \[(\w+)\]\n(.*?)^    # \[end\]$", SOURCE, re.MULTILINE | re.DOTALL))
    pieces.pop("end", None)
    shown = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    flat = [re.sub(r"^    ", "", each, flags=re.MULTILINE).strip() for each in pieces.values()]
    assert [each.strip() for each in shown] == flat
    for name in re.findall(r"`indices\.(\w+)", PAGE):
        assert hasattr(face.indices, name)
    for name in re.findall(r"`fingerprint\.(\w+)", PAGE):
        assert hasattr(fingerprint, name)
    for name in re.findall(r"`client\.(\w+)", PAGE):
        assert hasattr(face.Client, name) or name == "pool", name
    for name in re.findall(r"`sequence\.(\w+)", PAGE):
        assert hasattr(face.Sequence, name), name
