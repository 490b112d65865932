"""Moves as ticks tell them, and as the page draws them."""

from __future__ import annotations

import time
from typing import Any

from ..admin.http import Client, Stream
from ..tools.daemon import running
from ..tools.painting import Painter, scatter, until_rest
from .browser import SECONDS, browsing
from .forward import forwarded

OVERLAY = """(() => {
  const canvas = document.querySelector('#map-over');
  return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(each => each > 0);
})()"""


def test_moves_are_told_once_and_drawn_for_a_moment() -> None:
    """Ticks name every move that was published, by blocks and tokens; the page shows them and then no longer."""
    pool: dict[str, Any] = {"blocks": 65, "headroom": 0.0}
    with running(pools=[pool], compaction="off", compaction_duty=1.0) as daemon:
        admin = daemon.socket.with_name("admin.sock")
        with browsing() as browser, forwarded(admin) as address, Painter(daemon.socket) as painter:
            scatter(painter)
            tab = browser.open(address + "/", still=True)
            tab.until("globalThis.kvslot?.map.blocks === 65")
            assert tab.run(OVERLAY) is False
            with Stream(admin, "?only=tick") as stream:
                painter.defrag("once")
                until_rest(painter)
                with Client(admin) as client:
                    (gap,) = client.get("/v1/gaps").json()["items"]
                moved: list[list[int]] = []
                deadline = time.monotonic() + SECONDS
                for _, _, tick in stream.events():
                    moved += tick["pools"][0]["moved"]
                    if sum(tokens for _, _, tokens in moved) >= gap["moved_tokens"]:
                        break
                    assert time.monotonic() < deadline, moved
            assert len(moved) == gap["published"] > 5
            assert sum(tokens for _, _, tokens in moved) == gap["moved_tokens"]
            assert all(0 <= block < 65 for source, target, _ in moved for block in (source, target))
            assert sum(source != target for source, target, _ in moved) > 5
            # What the page was told may have gone again by now: it is told once more.
            tab.run(f"kvslot.map.moved({moved})")
            tab.until(OVERLAY)
            tab.until(f"!{OVERLAY}")
            assert tab.complaints == []
