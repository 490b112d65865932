"""The live page in a real browser, on a real daemon: what it shows is what the views say, and nobody is left out.

Skipped where there is no Chromium.  Pictures are looked at by people; these tests are for what can be said in words.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.wire.messages import Allocate, Commit, Free, Namespace, Record

from ..admin.http import Client
from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .browser import SECONDS, Browser, Tab, browsing
from .forward import forwarded

TOKEN = "0123456789abcdef-of-a-test"
LIVE = "document.querySelector('#state').textContent === 'live'"
NAME = "<img src=x onerror=alert(1)>"
"""What a client may call itself."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


Opener = Callable[..., Tab]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens tabs that are closed after the test; no script of theirs may have thrown."""
    tabs: list[Tab] = []

    def open_tab(address: str = "about:blank", **settings: Any) -> Tab:
        tabs.append(browser.open(address, **{"width": 1400, "height": 900, **settings}))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.close()
    assert [tab.complaints for tab in tabs if tab.complaints] == []


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two pools, a session that runs a sequence beside two cached prompts, on TCP with a token as well."""
    file = tmp_path_factory.mktemp("t") / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    pools: list[dict[str, Any]] = [{"blocks": 600}, {"name": "pages", "blocks": 33, "block_size": 8}]
    with (
        running(pools=pools, admin_tcp="127.0.0.1:0", admin_token_file=file) as daemon,
        Wire(daemon.socket) as wire,
    ):
        space = wire.hello(NAME, namespace=Namespace("acme", "model")).namespace
        for number, count in enumerate((400, 40), 1):
            wire.call(Allocate, space, number, tokens(count, 1000 * number))
            wire.call(Commit, number, count)
            wire.call(Free, number)
        wire.call(Allocate, space, 9, tokens(100, 9000))
        yield daemon
        wire.bye()


@pytest.fixture(scope="module")
def address(daemon: Running) -> Iterator[str]:
    """Where a browser finds it without a token: a port that leads to its Unix socket."""
    with forwarded(daemon.socket.with_name("admin.sock")) as address:
        yield address + "/"


@pytest.fixture(scope="module")
def shown(browser: Browser, address: str) -> Iterator[Tab]:
    """The page, once it is live and has a map; for tests that leave it as it was."""
    tab = browser.open(width=1400, height=900)
    tab.watch_requests()
    tab.go(address)
    ready(tab)
    yield tab
    tab.close()
    assert tab.complaints == []


def ready(tab: Tab) -> None:
    tab.until(f"{LIVE} && globalThis.kvslot?.map.blocks > 0")


def view(daemon: Running, path: str) -> Any:
    with Client(daemon.socket.with_name("admin.sock")) as client:
        return client.get(path).json()


def over_tcp(daemon: Running) -> str:
    (line,) = [each for each in daemon.text().splitlines() if '"admin_ready"' in each]
    return "http://{}/".format(json.loads(line)["tcp"])


# -- what it shows ----------------------------------------------------------------------------------------------------


def test_it_takes_nothing_from_elsewhere(shown: Tab, address: str) -> None:
    """All that the page asks for is the daemon's own; nothing breaks its policy; no script throws."""
    wanted = {
        "v1/stats",
        "v1/events",
        "v1/blocks",
        "v1/sessions",
        "v1/frag",
        "v1/gaps",
        "v1/latency",
        "healthz",
    }
    deadline = time.monotonic() + SECONDS
    while not all(any(address + each in asked for asked in shown.requests) for each in wanted):
        assert time.monotonic() < deadline, shown.requests
        shown.browser.rest(0.05)
    assert [each for each in shown.requests if not each.startswith((address, "data:"))] == []
    assert shown.complaints == []


def test_figures_are_those_of_the_views(daemon: Running, shown: Tab) -> None:
    """What nobody changes meanwhile is the same in the page as in the answers it is made from."""
    (pool,) = view(daemon, "/v1/pool?pool=default")["items"]
    legend = "[...document.querySelectorAll('#map-legend li')].map(each => each.textContent)"
    states = ("free", "private", "cached", "fenced", "moving", "reserved", "quarantined", "padding")
    wanted = [f"{state} {pool[state]:,}".replace(",", "\u202f") for state in states]
    shown.until(
        f"JSON.stringify({legend}) === {json.dumps(json.dumps(wanted, separators=(',', ':'), ensure_ascii=False))}"
    )
    assert shown.text("#map-about") == "600 blocks of 16 slots"
    (frag,) = view(daemon, "/v1/frag?pool=default")["items"]
    runs = "[...document.querySelectorAll('#runs b')].map(each => Number(each.textContent))"
    found = shown.until(f"document.querySelector('#runs li') && {runs}")
    assert found == [int(share + 0.5) for share in frag["usable_run_pct"].values()]
    assert shown.text("#t-seq") == "1"
    checks = view(daemon, "/healthz")["checks"]
    assert (
        shown.until("document.querySelector('#health').textContent")
        == f"{len(checks)} of {len(checks)} checks ok"
    )
    steps = shown.until("document.querySelector('#steps tbody')?.innerText")
    assert "Allocate" in steps


def test_the_map_is_the_pool(daemon: Running, shown: Tab) -> None:
    """Every block has the state that most of its slots in use have, and says how many those are; changes arrive."""

    def expected() -> list[list[Any]]:
        found = []
        for row in view(daemon, "/v1/blocks?pool=default")["items"]:
            counts = {
                state: count for state, count in row.items() if state not in ("block", "free") and count
            }
            most = max(counts, key=lambda state: counts[state]) if counts else "free"
            found.append([most, sum(counts.values())])
        return found

    cells = "[...Array(600).keys()].map(i => kvslot.map.cell(i)).map(each => [each.state, each.used])"
    before = expected()
    assert {state for state, _ in before} == {"free", "private", "cached", "padding"}
    shown.until(f"JSON.stringify({cells}) === {json.dumps(json.dumps(before, separators=(',', ':')))}")
    with Wire(daemon.socket) as wire:
        space = wire.hello("other").namespace
        wire.call(Allocate, space, 1, tokens(500, 70000))
        during = expected()
        assert during != before
        shown.until(f"JSON.stringify({cells}) === {json.dumps(json.dumps(during, separators=(',', ':')))}")
        wire.call(Free, 1)
        wire.bye()


def test_a_million_blocks_are_drawn_where_they_lie(opened: Opener, address: str) -> None:
    """A whole map and stretches of one end up as pixels of their states' colours, also at its very end."""
    tab = opened(address)
    ready(tab)
    blocks = 1_000_000
    tab.run(
        f"""(() => {{
          kvslot.map.apply = kvslot.map.apply.bind(kvslot.map);
          globalThis.feedMap = kvslot.map.apply;
          kvslot.map.apply = () => {{}}; // the daemon's own map stays out of this
          const whole = new Uint16Array({blocks}).fill(0);
          feedMap(whole.buffer, {{ whole: true, blocks: {blocks}, blockSize: 16 }});
          const stretch = (start, length, state) => {{
            const buffer = new ArrayBuffer(8 + 2 * length);
            new Uint32Array(buffer, 0, 2).set([start, length]);
            new Uint16Array(buffer, 8).fill((255 << 8) | state);
            return new Uint8Array(buffer);
          }};
          const parts = [stretch(0, 250000, 2), stretch(750000, 250000, 6)];
          const both = new Uint8Array(parts[0].length + parts[1].length);
          both.set(parts[0]);
          both.set(parts[1], parts[0].length);
          feedMap(both.buffer, {{ whole: false, blocks: {blocks}, blockSize: 16 }});
        }})()"""
    )
    read = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
      const canvas = document.querySelector('#map-base');
      const at = share => [...canvas.getContext('2d').getImageData(canvas.width / 2, canvas.height * share, 1, 1).data]
        .slice(0, 3);
      const of = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      done([at(0.1), at(0.5), at(0.85), of('--s-cached'), of('--s-free'), of('--s-quarantined')]);
    })))"""
    *pixels, cached, free, quarantined = tab.run(read)
    for pixel, color in zip(pixels, (cached, free, quarantined), strict=True):
        assert pixel == [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    assert tab.run("kvslot.map.cell(999999)") == {"state": "quarantined", "used": 16}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("count(0)", "0"),
        ("count(7)", "7"),
        ("count(9999)", "9 999"),
        ("count(10000)", "10.0 k"),
        ("count(123456)", "123 k"),
        ("count(999400)", "999 k"),
        ("count(999999)", "1.0 M"),
        ("count(16777216)", "16.8 M"),
        ("count(NaN)", "–"),
        ("percent(0)", "0 %"),
        ("percent(3.14159)", "3.1 %"),
        ("percent(99.96)", "100 %"),
        ("percent(100)", "100 %"),
        ("micros(0)", "–"),
        ("micros(4.25)", "4.3 µs"),
        ("micros(999)", "999 µs"),
        ("micros(8388)", "8.4 ms"),
        ("micros(67108)", "67 ms"),
        ("micros(2500000)", "2.5 s"),
        ("span(9.96)", "10.0 s"),
        ("span(59)", "59 s"),
        ("span(3725)", "1 h 2 min"),
        ("span(90000)", "1 d 1 h"),
        ("bytes(1023)", "1023 B"),
        ("bytes(1536)", "1.5 KiB"),
        ("bytes(150 * 1024 ** 3)", "150 GiB"),
    ],
)
def test_numbers_are_short(shown: Tab, call: str, text: str) -> None:
    """A number has three or four digits and its unit, and no more."""
    found = shown.run(f"import('/page/format.js').then(each => each.{call})")
    assert found.replace("\u202f", " ") == text


def test_who_holds_what(daemon: Running, shown: Tab) -> None:
    """Sessions show by the names that they gave themselves, as text and nothing else; tabs show the other holders."""
    rows = "[...document.querySelectorAll('#table-holders tbody tr')].map(each => each.innerText)"
    (row,) = shown.until(f"(rows => rows[0]?.includes('onerror') && rows)({rows})")
    (session,) = view(daemon, "/v1/sessions?pool=default")["items"]
    cells = row.split("\t")
    assert cells[:4] == [str(session["session"]), NAME, str(session["pid"]), "live"]
    assert cells[4] == str(session["charged"])
    assert shown.run("document.querySelectorAll('img').length") == 0
    shown.run("document.querySelector('#tab-sessions').focus()")
    shown.key("ArrowRight")
    assert shown.run("document.activeElement.id") == "tab-prefixes"
    sizes = shown.until(f"(rows => rows.length >= 2 && rows)({rows})")
    assert [each.split("\t")[2] for each in sizes[:2]] == ["400", "40"]
    assert sizes[0].startswith("acme / model\t")
    shown.key("Home")
    shown.until(f"{rows}[0]?.includes('onerror')")


def test_pools_are_told_apart(opened: Opener, address: str) -> None:
    """Another pool is chosen by its name, and then everything is of that one."""
    tab = opened(address)
    ready(tab)
    tab.run("(() => { const all = document.querySelector('#pool'); all.value = 'pages'; "
            "all.dispatchEvent(new Event('change', { bubbles: true })); })()")  # fmt: skip
    tab.until("kvslot.map.blocks === 33")
    tab.until("document.querySelector('#table-holders tbody').innerText.includes('no sessions')")
    tab.until("document.querySelector('#t-used').textContent.startsWith('0')")


# -- events -----------------------------------------------------------------------------------------------------------


def test_events_are_filtered_and_paused(daemon: Running, opened: Opener, address: str) -> None:
    """The tail holds what was before, shows what passes the filter, and stands still while it is paused."""
    tab = opened(address)
    ready(tab)
    lines = "[...document.querySelectorAll('#events b')].map(each => each.textContent)"
    found = tab.until(f"(all => all.includes('session_opened') && all)({lines})")
    assert "ready" in found
    tab.key("/")
    assert tab.run("document.activeElement.id") == "filter"
    tab.type("opened onerror")
    tab.until(f"JSON.stringify({lines}) === '[\"session_opened\"]'")
    tab.run("document.querySelector('#filter').blur()")
    tab.run("(() => { const all = document.querySelector('#filter'); all.value = 'session_'; "
            "all.dispatchEvent(new Event('input')); })()")  # fmt: skip
    tab.key("p")
    assert tab.run("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    before = tab.run(lines)
    with Wire(daemon.socket) as wire:
        wire.hello("late")
        wire.bye()
    tab.until("/paused; [1-9]/.test(document.querySelector('#events-count').textContent)")
    assert tab.run(lines) == before
    tab.key("p")
    tab.until(f"{lines}.length > {len(before)}")


def test_a_row_stays_where_it_is_while_others_come(daemon: Running, opened: Opener, address: str) -> None:
    """The tail adds what is new before what is there: rows are not made again, and none is there twice."""
    tab = opened(address)
    ready(tab)
    tab.until("document.querySelectorAll('#events time').length >= 3")
    tab.run("document.querySelector('#events li:last-child').marked = true")
    before = tab.run("document.querySelectorAll('#events li').length")
    with Wire(daemon.socket) as wire:
        wire.hello("one more")
        wire.bye()
    tab.until(f"document.querySelectorAll('#events li').length >= {before} + 2")
    assert tab.run("document.querySelector('#events li:last-child').marked") is True
    numbers = tab.run("[...document.querySelectorAll('#events li')].map(each => Number(each.dataset.number))")
    assert numbers == sorted(set(numbers), reverse=True)


def test_nobody_looking_costs_next_to_nothing(opened: Opener, address: str) -> None:
    """A hidden tab follows events and asks for nothing else; looked at again, it catches up."""
    tab = opened(address)
    ready(tab)
    tab.until("document.querySelector('#health').textContent !== ''")
    tab.run("Object.defineProperty(document, 'hidden', { get: () => globalThis.away, configurable: true })")
    tab.run("globalThis.away = true")
    tab.watch_requests()
    deadline = time.monotonic() + SECONDS
    while True:  # what was under way comes to its end first
        tab.requests.clear()
        ticks = tab.run("kvslot.daemon.length")
        tab.until(f"kvslot.daemon.length >= {ticks} + 3")
        if not tab.requests:
            break
        assert time.monotonic() < deadline, tab.requests
    tab.run("(globalThis.away = false, document.dispatchEvent(new Event('visibilitychange')), true)")
    deadline = time.monotonic() + SECONDS
    while not any("v1/blocks" in each for each in tab.requests):
        assert time.monotonic() < deadline, tab.requests
        tab.browser.rest(0.05)


def test_whoever_records_is_seen(daemon: Running, opened: Opener, address: str) -> None:
    """As long as a recording lasts, and no longer, since whoever records is none of the sessions."""
    tab = opened(address)
    ready(tab)
    notes = "document.querySelector('#notes').textContent"
    with Wire(daemon.socket) as recorder:
        recorder.call(Record, "start")
        tab.until(f"/Recorded: pool default, by process \\d+, since /.test({notes})")
    tab.until(f"!/Recorded/.test({notes})")


# -- the daemon goes and comes ----------------------------------------------------------------------------------------


def test_it_says_when_the_daemon_is_gone_and_comes_back_by_itself(opened: Opener) -> None:
    """Within seconds of its end the page says so; another daemon at its place is followed without a word from us."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvs"))
        stack.callback(shutil.rmtree, folder)
        address = stack.enter_context(forwarded(folder / "admin.sock"))
        with running(socket=folder / "s", pools=[{"blocks": 40}]):
            tab = opened(address + "/")
            ready(tab)
            assert tab.run("kvslot.map.blocks") == 40
        tab.until("document.querySelector('#state').textContent === 'gone'")
        tab.until("/gone since/.test(document.querySelector('#notes').textContent)")
        assert tab.run("document.title").startswith("(gone)")
        with running(socket=folder / "s", pools=[{"blocks": 50}]):
            ready(tab)
            tab.until("kvslot.map.blocks === 50")
            tab.until("/started again/.test(document.querySelector('#notes').textContent)")
            tab.until("!/gone since/.test(document.querySelector('#notes').textContent)")


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_and_goes_into_no_address(daemon: Running, opened: Opener) -> None:
    """Over TCP a wrong token is told, a right one shows the page, and it is kept only where that is wished."""
    tab = opened()
    tab.watch_requests()
    tab.go(over_tcp(daemon))

    def enter(token: str) -> None:
        tab.until("document.querySelector('#token-dialog').open && document.activeElement.id === 'token'")
        tab.type(token)
        tab.key("Enter")

    enter("nobody-knows-this-one")
    tab.until("/not known/.test(document.querySelector('#token-wrong').textContent)")
    assert "/v1/blocks" not in " ".join(tab.requests)
    enter(TOKEN)
    ready(tab)
    tab.call("Page.reload")
    tab.until("document.querySelector('#token-dialog')?.open")
    tab.run("document.querySelector('#token-keep').click()")
    tab.run("document.querySelector('#token').focus()")
    enter(TOKEN)
    ready(tab)
    tab.call("Page.reload")
    ready(tab)
    assert [each for each in tab.requests if TOKEN in each] == []
    assert TOKEN not in tab.run("document.documentElement.outerHTML + location.href + document.cookie")


def test_only_files_are_served_without_a_token(daemon: Running) -> None:
    """Over TCP the page's own files, which hold nothing, come without a token; the tables do not."""
    host, _, port = over_tcp(daemon).removeprefix("http://").rstrip("/").rpartition(":")
    with Client((host, int(port))) as client:
        page = client.get("/")
        assert page.status == 200
        named = re.findall(r'(?:src|href)="(page/[a-z.]+)"', page.body.decode())
        assert "page/main.js" in named
        assert "page/page.css" in named
        for path in named:
            answer = client.get("/" + path)
            assert answer.status == 200
            assert TOKEN.encode() not in answer.body
        for path in ("/", "/page/main.js"):
            policy = client.get(path).headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert client.ask("HEAD", path).body == b""
        assert client.get("/plain").status == 401
        assert client.get("/page/none.js").status == 401
        assert client.ask("POST", "/").status == 401
        assert client.get("/plain", Authorization=f"Bearer {TOKEN}").status == 200


# -- for everybody ----------------------------------------------------------------------------------------------------


def test_without_scripts_there_are_tables(daemon: Running, opened: Opener, address: str) -> None:
    """Where scripts are off the browser is led to tables with the same sums; what clients say is text there, too."""
    tab = opened(scripts=False)
    tab.go(address)
    deadline = time.monotonic() + SECONDS
    # Nothing can be evaluated here: the document is asked for its text.  The page itself leads on to the tables.
    while "Who holds what" not in (html := tab.html()) or "needs JavaScript" in html:
        assert time.monotonic() < deadline, html[:500]
        tab.browser.rest(0.1)
    (pool,) = view(daemon, "/v1/pool?pool=default")["items"]
    text = re.sub(r"<[^>]+>", " ", html)
    assert re.search(rf"cached\s+{pool['cached']}\s", text)
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "<img" not in html
    assert "Allocate" in text
    assert "session_opened" in text


def test_keys_go_everywhere(shown: Tab) -> None:
    """Single keys lead to map, filter and help; the map is gone through by arrows and says what is there."""
    shown.run("document.activeElement.blur()")
    shown.key("m")
    assert shown.run("document.activeElement.id") == "map"
    shown.key("Home")
    assert shown.text("#map-read").startswith("Block 0, slots 0 to 15")
    shown.key("ArrowRight")
    assert shown.text("#map-read").startswith("Block 1,")
    shown.key("Enter")
    shown.until("/^Block 1: [a-z]+ [0-9]+/.test(document.querySelector('#map-read').textContent)")
    assert float(shown.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")) >= 2
    shown.key("Escape")
    shown.run("document.querySelector('#c-hit canvas').focus()")
    shown.key("Home")
    first = shown.run("document.activeElement.getAttribute('aria-valuetext')")
    assert re.match(r"\d\d:\d\d:\d\d: over 10 s ", first)
    shown.key("?")
    assert shown.run("document.querySelector('#help-dialog').open") is True
    shown.key("Escape")
    shown.until("!document.querySelector('#help-dialog').open")


def test_everything_to_be_reached_has_a_name_and_shows_its_focus(shown: Tab) -> None:
    """A screen reader finds no nameless control, and whatever the tab key reaches has an outline of two pixels."""
    controls = {
        "button",
        "combobox",
        "searchbox",
        "textbox",
        "tab",
        "slider",
        "link",
        "checkbox",
        "application",
    }
    named = [(role, name) for role, name in shown.names() if role in controls]
    assert len(named) > 30
    assert [each for each in named if not each[1].strip()] == []
    shown.run("document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(60):
        shown.key("Tab")
        told = shown.run(
            "(e => [e.id || e.className || e.tagName, parseFloat(getComputedStyle(e).outlineWidth), "
            "e === document.body])(document.activeElement)"
        )
        if told[2]:
            break
        assert told[1] >= 2, told
        reached.add(told[0])
    assert {"map", "theme", "filter", "pause", "events", "tab-sessions", "window", "table-holders"} <= reached


CONTRAST = """(() => {
  const of = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const light = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16) / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ratio = (one, other) => {
    const [low, high] = [light(of(one)), light(of(other))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const words = ['--text', '--soft', '--faint', '--accent', '--good', '--warm', '--bad'];
  return [...words.map(each => [each, ratio(each, '--panel'), 4.5]),
          ['--warm on its ground', ratio('--text', '--warm-ground'), 4.5],
          ['--bad on its ground', ratio('--text', '--bad-ground'), 4.5],
          ...['--s-cached', '--s-private', '--s-moving', '--s-quarantined'].map(
            each => [each, ratio(each, '--s-free'), 2.0])];
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(opened: Opener, address: str, dark: bool) -> None:
    """The page goes by what the system prefers and by its own switch; words stand out from their ground in both."""
    tab = opened(address, dark=dark)
    ready(tab)
    ground = "getComputedStyle(document.body).backgroundColor"
    of_the_system = tab.run(ground)
    assert [each for each in tab.run(CONTRAST) if each[1] < each[2]] == []
    tab.key("t")  # light
    light = tab.run(ground)
    assert (light == of_the_system) is not dark
    tab.key("t")  # dark
    assert tab.run(ground) != light
    assert [each for each in tab.run(CONTRAST) if each[1] < each[2]] == []
    tab.call("Page.reload")
    ready(tab)
    assert tab.run("document.documentElement.dataset.theme") == "dark"
    tab.key("t")  # as the system
    assert tab.run(ground) == of_the_system


@pytest.mark.parametrize("width", [320, 700, 1100])
def test_it_fits_narrow_screens(opened: Opener, address: str, width: int) -> None:
    """Nothing stands out at the side, and the map has room."""
    tab = opened(address, width=width, height=800, still=True)
    ready(tab)
    tab.until("document.querySelector('#table-holders tbody tr') !== null")
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("document.querySelector('#map').clientWidth") > 0.6 * min(width, 700)
    assert tab.run("document.getAnimations().length") == 0
