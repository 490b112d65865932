"""Who may look and who may act: tokens, their files, hosts and origins."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.admin import SourceError, TokenError, guard, read_tokens
from kvslot.api.admin.auth import by_token, check_host, check_origin, host_of
from kvslot.daemon import config

from ..tools.daemon import Running, configuration, running
from .http import Client, connect, gone

VIEW = "view-0123456789abcdef"
ACT = "act-0123456789abcdef0"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.touch()
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tokens_are_told_apart_by_file(tmp_path: Path) -> None:
    """One of the file for looking may look, one of the file for acts may act, others are nobody's."""
    views = write(tmp_path / "v", f"# of the scraper\n\n{VIEW}\n  {VIEW}-old  \n")
    acts = write(tmp_path / "a", ACT)
    tokens = read_tokens(str(views), str(acts))
    assert len(tokens) == 3
    for token, may_act in ((VIEW, False), (VIEW + "-old", False), (ACT, True)):
        identity = tokens.identify(token)
        assert identity is not None
        assert identity.acts is may_act
        assert token not in identity.text()
    for token in ("", VIEW[:-1], VIEW + "x", "é" * 20, "\udcff" * 20):
        assert tokens.identify(token) is None


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, "holds no token"), ("# nothing\n", 0o600, "holds no token"), ("short\n", 0o600, "16 to 512"),
        ("a b c d e f g h i j k\n", 0o600, "without spaces"), ("x" * 600, 0o600, "16 to 512"),
        ("é" * 30, 0o600, "ASCII"), (f"{VIEW}\n" * 100, 0o600, "the most"), ("x\n" * 70_000, 0o600, "no token file"),
        (VIEW, 0o644, "chmod"), (VIEW, 0o620, "chmod"), (VIEW, 0o602, "chmod"),
    ],
)  # fmt: skip
def test_token_files_that_cannot_be(tmp_path: Path, text: str, mode: int, said: str) -> None:
    """Each is refused in words, and none of its content is in them."""
    path = write(tmp_path / "t", text, mode)
    with pytest.raises(TokenError, match=said) as refused:
        read_tokens(str(path), "")
    assert VIEW not in str(refused.value)


def test_what_is_no_token_file(tmp_path: Path) -> None:
    """A file that is not there, a folder, a pipe: refused at once, without waiting."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", ".", "pipe"):
        with pytest.raises(TokenError):
            read_tokens(str(tmp_path / name), "")


def test_authorization_headers(tmp_path: Path) -> None:
    """Bearer, and Basic as browsers send it; everything else is 401."""
    tokens = read_tokens(str(write(tmp_path / "t", VIEW)), "")
    basic = base64.b64encode(f"any:{VIEW}".encode()).decode()
    for header in (f"Bearer {VIEW}", f"bearer  {VIEW} ", f"Basic {basic}"):
        assert by_token(tokens, header).how == "token"
    wrong = [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Token {VIEW}",
        VIEW,
        f"Bearer {VIEW}x",
        "Basic !!!",
        "Basic AAAA",
        "Basic /w==",
    ]
    for each in wrong:
        with pytest.raises(SourceError) as refused:
            by_token(tokens, each)
        assert refused.value.status == 401


def test_hosts_of_others_are_misdirected() -> None:
    """On the Unix socket a host with a foreign name is refused, so that no site's name leads a browser here."""
    for host in (
        "localhost",
        "localhost:9477",
        "kvslot",
        "127.0.0.1:9477",
        "[::1]:80",
        "a.localhost",
        "",
        None,
    ):
        check_host(host)
    for host in ("evil.example", "evil.example:9477", "127.0.0.1.evil.example", "localhost.evil.example"):
        with pytest.raises(SourceError) as refused:
            check_host(host)
        assert refused.value.status == 421
    assert [host_of(each) for each in ("A:1", "[::1]:5", "::1", "a.b")] == ["a", "::1", "::1", "a.b"]


def test_acts_of_other_sites_are_refused() -> None:
    """A page of this daemon may act, curl may, another site's page may not."""
    for headers in (
        {}, {"Host": "localhost:1", "Origin": "http://localhost:1"}, {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):  # fmt: skip
        check_origin(headers)
    for headers in (
        {"Host": "localhost:1", "Origin": "http://localhost:2"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"},
        {"Host": "localhost:1", "Origin": "http://localhost:1", "Sec-Fetch-Site": "cross-site"},
    ):  # fmt: skip
        with pytest.raises(SourceError) as refused:
            check_origin(headers)
        assert refused.value.status == 403


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"admin_tcp": "127.0.0.1:9477"}, "tokens only"),
        ({"admin_tcp": "0.0.0.0:9477", "admin_token_file": "t"}, "admin_tcp_any"),
        ({"admin_tcp": "[::]:9477", "admin_token_file": "t"}, "admin_tcp_any"),
        ({"admin_tcp": "localhost:9477", "admin_token_file": "t"}, "as numbers"),
        ({"admin_tcp": "127.0.0.1", "admin_token_file": "t"}, "as numbers"),
        ({"admin_tcp": "127.0.0.1:99999", "admin_token_file": "t"}, "as numbers"),
        ({"admin_socket": "x" * 110}, "choose a shorter one"),
        ({"admin_socket": "s"}, "engines' socket"),
        ({"admin_socket_mode": 0o1777}, "permission bits"),
        ({"admin_socket_group": "no such group"}, "groupadd"),
        ({"admin_connections": 0}, "out of range"),
    ],
)
def test_settings_that_let_anyone_in_are_refused(
    tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    """A start with them ends before anything is made, with what to do."""
    file = tmp_path / "kvslot.toml"
    file.write_text(configuration(Path("s"), [{}], settings))
    with pytest.raises(config.ConfigError, match=said):
        config.load(file, {})


def test_what_is_allowed_outright(tmp_path: Path) -> None:
    """Another address with the word that allows it, and anything with the API switched off."""
    file = tmp_path / "kvslot.toml"
    tcp = {"admin_tcp": "0.0.0.0:9477", "admin_tcp_any": True, "admin_token_file": "t"}
    file.write_text(configuration(Path("s"), [{}], tcp))
    assert config.admin_address(config.load(file, {})) == ("0.0.0.0", 9477)
    file.write_text(configuration(Path("s"), [{}], {"admin": False, "admin_tcp": "nonsense"}))
    assert not config.load(file, {}).admin


def refused(said: str, **settings: Any) -> None:
    """A daemon with such settings ends as it starts, with code 3 and these words."""
    match = f"ended with 3:(?s:.)*{re.escape(said)}"
    with pytest.raises(AssertionError, match=match), running(**settings):
        pass  # never


def test_a_bad_token_file_ends_the_start(tmp_path: Path) -> None:
    """The daemon does not serve TCP without the tokens it was told to use, nor without TCP at all."""
    token = write(tmp_path / "t", VIEW, 0o644)
    refused("chmod", admin_tcp="127.0.0.1:0", admin_token_file=token)


def test_a_taken_port_ends_the_start(tmp_path: Path) -> None:
    """... and says which."""
    token = write(tmp_path / "t", VIEW)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(where, admin_tcp=where, admin_token_file=token)


# -- live -------------------------------------------------------------------------------------------------------------


def test_tcp_takes_tokens_and_nothing_else(tmp_path: Path) -> None:
    """Without a token nothing is shown, health neither; with one views are, and acts only with one for acts."""
    tokens: dict[str, Any] = {
        "admin_token_file": write(tmp_path / "v", VIEW), "admin_act_token_file": write(tmp_path / "a", ACT)
    }  # fmt: skip
    with running(admin_tcp="127.0.0.1:0", **tokens) as daemon:
        where = tcp_of(daemon)
        with Client(where) as client:
            for path in (
                "/healthz",
                "/readyz",
                "/metrics",
                "/openapi.json",
                "/v1/stats",
                "/v1/events",
                "/nope",
            ):
                answer = client.get(path)
                assert (answer.status, answer.code) == (401, "unauthorized"), path
                assert "Bearer" in answer.headers["www-authenticate"]
            assert client.act("evict", {"tokens": 5}).status == 401
        with Client(where, {"Authorization": f"Bearer {VIEW}"}) as client:
            assert client.get("/v1/stats").status == 200
            assert client.get("/v1/stats", Host="any.example").status == 200
            answer = client.act("evict", {"tokens": 5})
            assert (answer.status, answer.code) == (403, "denied")
        basic = base64.b64encode(f"me:{ACT}".encode()).decode()
        with Client(where, {"Authorization": f"Basic {basic}"}) as client:
            assert client.get("/healthz").status == 200
            assert client.act("evict", {"tokens": 5}).json() == {"tokens": 0}
            assert client.act("evict", {"tokens": 5}, Origin="http://evil.example").status == 403
        with Client(daemon.socket.with_name("admin.sock")) as client:
            assert client.get("/v1/stats").status == 200
            assert client.get("/v1/stats", Host="evil.example").status == 421
        text = daemon.text()
        assert '"how":"token"' in text
        assert VIEW not in text
        assert ACT not in text


def test_tokens_are_read_again_at_a_reload(tmp_path: Path) -> None:
    """A new token holds after a reload, the old one no longer; a file that cannot be used leaves all as it was."""
    file = write(tmp_path / "a", ACT)
    with running(admin_tcp="127.0.0.1:0", admin_act_token_file=file) as daemon:
        where = tcp_of(daemon)
        with Client(where) as client:
            old, new = {"Authorization": f"Bearer {ACT}"}, {"Authorization": f"Bearer {ACT}-new"}
            assert client.ask("GET", "/readyz", headers=new).status == 401
            file.write_text(f"{ACT}-new\n")
            assert client.ask("POST", "/v1/acts/reload", headers=old).status == 200
            assert client.ask("GET", "/readyz", headers=old).status == 401
            assert client.ask("GET", "/readyz", headers=new).status == 200
            file.chmod(0o666)
            assert client.ask("POST", "/v1/acts/reload", headers=new).status == 200
            assert client.ask("GET", "/readyz", headers=new).status == 200
        assert '"admin_tokens_kept"' in daemon.text()


def test_the_api_can_be_switched_off() -> None:
    """Then there is no socket of it, and the daemon serves engines all the same."""
    with running(admin=False) as daemon:
        assert not daemon.socket.with_name("admin.sock").exists()
        assert '"admin_ready"' not in daemon.text()


def test_a_socket_of_another_daemon_is_left_alone() -> None:
    """S59: of two daemons in a folder the second has no API, and says so; asked for one by name, it does not start."""
    with running() as first:
        admin = first.socket.with_name("admin.sock")
        with running(socket=first.socket.with_name("t")) as second:
            assert '"admin_unavailable"' in second.text()
            with Client(admin) as client:
                assert client.get("/v1/stats").json()["pid"] == first.pid
        refused("is served by another", socket=first.socket.with_name("t"), admin_socket=admin)
        with Client(admin) as client:
            assert client.get("/v1/stats").json()["pid"] == first.pid


def tcp_of(daemon: Running) -> tuple[str, int]:
    """Where it serves TCP, by its log."""
    line = next(line for line in daemon.text().splitlines() if '"admin_ready"' in line)
    host, _, port = json.loads(line)["tcp"].rpartition(":")
    return host, int(port)


def test_strangers_on_tcp_lock_nobody_out(tmp_path: Path) -> None:
    """Connections without a token fill their own room, and are closed soon; the Unix socket has its own."""
    hasty = "from kvslot.api.admin import guard; guard.STRANGER_SECONDS = 0.5"
    file = write(tmp_path / "v", VIEW)
    with running(first=hasty, admin_tcp="127.0.0.1:0", admin_token_file=file, admin_connections=4) as daemon:
        where = tcp_of(daemon)
        held = [connect(where) for _ in range(20)]
        try:
            deadline = time.monotonic() + 20
            while '"admin_refused"' not in daemon.text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for _ in range(3):
                with Client(daemon.socket.with_name("admin.sock")) as client:
                    assert client.get("/healthz").status == 200
            for sock in held:
                gone(sock)
        finally:
            for sock in held:
                sock.close()
        with Client(where, {"Authorization": f"Bearer {VIEW}"}) as client:
            assert client.get("/healthz").status == 200
            made = time.monotonic()
            while time.monotonic() - made < 3.0:  # beyond what strangers have
                time.sleep(0.1)
            assert client.get("/healthz").status == 200


def test_requests_are_charged_to_those_who_ask() -> None:
    """Who has no token waits behind its like, 5 s at most, and those who have one do not wait for them."""
    room = guard.Room(0.0)
    waits = [room.strangers.take(0.0) for _ in range(10_000)]
    assert waits[0] == 0.0
    assert 0.0 < waits[-1] <= guard.WAIT_MOST
    assert room.requests.take(0.0) == 0.0
