"""Who may look and who may act: tokens, their files, hosts and origins."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvslot.api.admin import SourceError, TokenError, guard, read_tokens
from kvslot.api.admin.auth import by_token, check_host, check_origin, host_of
from kvslot.api.client import Control
from kvslot.api.wire.messages import Reloaded
from kvslot.daemon import config
from kvslot.daemon.admin import TOKEN_LINES
from kvslot.daemon.main import main

from ..tools.daemon import Running, configuration, running
from ..tools.wire import Wire
from .http import Client, Stream, connect, gone

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


def shut(daemon: Running, door: str) -> dict[str, Any]:
    """The last line that says so of a door."""
    lines = [json.loads(line) for line in daemon.text().splitlines() if '"admin_unavailable"' in line]
    found: dict[str, Any] = [line for line in lines if line["door"] == door][-1]
    return found


def health_of(daemon: Running) -> tuple[int, dict[str, Any]]:
    """Status of /healthz, and its checks by name."""
    with Client(daemon.socket.with_name("admin.sock")) as client:
        answer = client.get("/healthz")
        return answer.status, {each["name"]: each for each in answer.json()["checks"]}


def reload(daemon: Running) -> Reloaded:
    with Control(str(daemon.socket)) as control:
        return control.reload()


def served(daemon: Running) -> None:
    """Engines are."""
    with Wire(daemon.socket) as wire:
        wire.hello()


def spoil(path: Path, how: str) -> None:
    match how:
        case "missing":
            path.unlink()
        case "open":
            path.chmod(0o644)
        case "empty":
            path.write_text("")
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "said"), [("missing", "no such file"), ("open", "mode 0644"), ("empty", "holds no token")]
)
def test_a_bad_token_file_costs_tcp_only(tmp_path: Path, how: str, said: str) -> None:
    """Engines are served, one line and a failed check say what to do, and done as it says a reload opens TCP."""
    file = write(tmp_path / "t", VIEW)
    spoil(file, how)
    with running(admin_tcp="127.0.0.1:0", admin_token_file=file) as daemon:
        served(daemon)
        line = shut(daemon, "admin_tcp")
        assert line["level"] == "error"
        assert said in line["reason"]
        assert str(file) in line["reason"]
        assert "reload" in line["remedy"]
        status, checks = health_of(daemon)
        assert status == 200  # a supervisor that restarted it would lose the cache, and mend nothing
        assert not checks["admin_tcp"]["ok"]
        assert said in checks["admin_tcp"]["reason"]
        assert any(said in each for each in reload(daemon).failed)
        write(file, VIEW)
        told = reload(daemon)
        assert not told.failed
        assert "served at 127.0.0.1:" in told.taken[0]
        with Client(tcp_of(daemon), {"Authorization": f"Bearer {VIEW}"}) as client:
            assert client.get("/readyz").status == 200
        assert health_of(daemon)[1]["admin_tcp"]["ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_token_file_of_root_is_told_to_the_daemons_user() -> None:
    """The commonest of mistakes: written by root, and the daemon is another user."""
    with tempfile.TemporaryDirectory() as folder:  # not below one that only root can enter, as tests' own are
        Path(folder).chmod(0o755)
        _told_to_nobody(write(Path(folder) / "t", VIEW))


def _told_to_nobody(file: Path) -> None:
    program = """
import os, sys
from kvslot.api.admin import TokenError, read_tokens
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    read_tokens(sys.argv[1], "")
except TokenError as error:
    print(error.reason, error.remedy, sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-Ic", program, str(file)], capture_output=True, text=True, check=True
    )
    reason, remedy = done.stdout.splitlines()
    assert reason == f"{file}: user nobody may not read it (it is 0:0 0600)"
    assert remedy == f"chown nobody {file} && chmod 600 {file}"


def test_a_taken_port_and_a_wrong_address_cost_tcp_only(tmp_path: Path) -> None:
    """Engines are served; a reload has the port once it is free, and another address once the settings say it."""
    token = write(tmp_path / "t", VIEW)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with running(admin_tcp=where, admin_token_file=token) as daemon:
            served(daemon)
            line = shut(daemon, "admin_tcp")
            assert line["where"] == where
            assert "is taken" in line["reason"]
            assert any("is taken" in each for each in reload(daemon).failed)
            file = daemon.socket.with_name("kvslot.toml")
            text = file.read_text()
            elsewhere = f'admin_tcp = "203.0.113.1:{where.rpartition(":")[2]}"\nadmin_tcp_any = true'
            file.write_text(text.replace(f'admin_tcp = "{where}"', elsewhere))
            assert any("no such address" in each for each in reload(daemon).failed)
            file.write_text(text)
            taken.close()
            told = reload(daemon)
            assert not told.failed
            assert "admin_tcp" in told.changed
            with Client(tcp_of(daemon), {"Authorization": f"Bearer {VIEW}"}) as client:
                assert client.get("/readyz").status == 200
                file.write_text(text.replace(f'admin_tcp = "{where}"', ""))
                assert "is closed" in reload(daemon).taken[0]
                gone(client.sock)
            with pytest.raises(ConnectionRefusedError):
                connect(("127.0.0.1", int(where.rpartition(":")[2])))
            assert "admin_tcp" not in health_of(daemon)[1]


def test_an_address_that_cannot_be_had_keeps_the_one_that_works(tmp_path: Path) -> None:
    """Who is in by the old one stays, by tokens that hold; where one is part of the other it is had again, or moved."""
    file = write(tmp_path / "t", VIEW)
    bearer = {"Authorization": f"Bearer {VIEW}"}
    with running(admin_tcp="127.0.0.1:0", admin_token_file=file, admin_tcp_any=True) as daemon:
        where = tcp_of(daemon)
        port = where[1]
        settings = daemon.socket.with_name("kvslot.toml")
        text = settings.read_text()

        def moved(address: str) -> Reloaded:
            settings.write_text(text.replace('"127.0.0.1:0"', f'"{address}"'))
            return reload(daemon)

        with Client(where, bearer) as client:
            assert client.get("/readyz").status == 200
            told = moved(f"203.0.113.1:{port}")
            assert not told.taken
            assert "no such address" in told.failed[0]
            assert f"127.0.0.1:{port} is served as before" in told.failed[0]
            assert f"127.0.0.1:{port} is served as before" in health_of(daemon)[1]["admin_tcp"]["reason"]
            assert client.get("/readyz").status == 200
            assert not moved("127.0.0.1:0").failed
            assert health_of(daemon)[1]["admin_tcp"]["ok"]
            with socket.socket() as other:
                other.bind(("127.0.0.2", port))
                other.listen()
                told = moved(f"0.0.0.0:{port}")
                assert "is taken" in told.failed[0]
                assert client.get("/readyz").status == 200
            with Client(where, bearer) as late:
                assert late.get("/readyz").status == 200
            told = moved(f"0.0.0.0:{port}")
            assert not told.failed
            assert told.taken == [
                f"admin_tcp: 127.0.0.1:{port} is closed", f"admin_tcp: served at 0.0.0.0:{port} from now on"
            ]  # fmt: skip
            gone(client.sock)
        with Client(("127.0.0.2", port), bearer) as client:
            assert client.get("/readyz").status == 200
            file.write_text(f"{VIEW}-new")
            told = moved(f"203.0.113.1:{port}")
            assert "no longer: " in told.taken[0]
            assert client.get("/readyz").status == 401
        text = text.replace("admin_tcp_any = true\n", "")
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            told = moved(f"127.0.0.1:{other.getsockname()[1]}")
        assert "is closed" in told.taken[0]
        assert "is taken" in told.failed[0]


@pytest.mark.parametrize(
    ("how", "said"), [("missing", "no such file"), ("open", "mode 0644"), ("empty", "holds no token")]
)
def test_check_config_finds_what_keeps_tcp_shut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, said: str
) -> None:
    """Each is a warning with what to do; the settings are well, and a daemon would serve engines with them."""
    token = write(tmp_path / "t", VIEW)
    file = tmp_path / "kvslot.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = {"admin_tcp": where, "admin_token_file": token}
        file.write_text(configuration(tmp_path / "s", [{}], settings))
        taken.listen()
        assert main(["--config", str(file), "--check-config", "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)["admin"]
        assert f"admin_tcp {where}: the port is taken by process {os.getpid()}" in told
    spoil(token, how)
    assert main(["--config", str(file), "--check-config"]) == 0
    assert said in capsys.readouterr().err


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
        told = reload(daemon)
        assert "those of before hold on, 0 that may look and 1 that may act" in told.failed[0]
        assert "served with the tokens of before" in health_of(daemon)[1]["admin_tcp"]["reason"]
        file.chmod(0o600)
        file.write_text(f"{ACT}-newer\n")
        assert re.search("new: [0-9a-f]{8}; no longer: [0-9a-f]{8}", reload(daemon).taken[0])
        assert health_of(daemon)[1]["admin_tcp"]["ok"]
        assert ACT not in daemon.text()


def test_who_follows_events_by_a_token_that_is_gone_is_closed(tmp_path: Path) -> None:
    """One that was taken out of the file ends what goes on by it; the others go on."""
    file = write(tmp_path / "v", f"{VIEW}\n{VIEW}-other\n")
    with running(admin_tcp="127.0.0.1:0", admin_token_file=file) as daemon:
        where = tcp_of(daemon)
        with (
            Stream(where, Authorization=f"Bearer {VIEW}") as gone_soon,
            Stream(where, Authorization=f"Bearer {VIEW}-other") as stays,
        ):
            stays.until("tick")
            file.write_text(f"{VIEW}-other\n")
            assert reload(daemon).taken
            gone(gone_soon.sock)
            stays.until("tick")


def test_a_token_that_is_gone_keeps_nobody_out(tmp_path: Path) -> None:
    """Who is connected by a token that was taken away is a stranger again: its place is another's, and it is closed."""
    hasty = "from kvslot.api.admin import guard; guard.STRANGER_SECONDS = 0.5"
    file = write(tmp_path / "v", VIEW)
    with running(first=hasty, admin_tcp="127.0.0.1:0", admin_token_file=file, admin_connections=2) as daemon:
        where = tcp_of(daemon)
        old = [Client(where, {"Authorization": f"Bearer {VIEW}"}) for _ in range(2)]
        for client in old:
            assert client.get("/v1/stats").status == 200
        file.write_text(f"{VIEW}-new\n")
        assert "no longer: " in reload(daemon).taken[0]
        with Client(where, {"Authorization": f"Bearer {VIEW}-new"}) as client:
            assert client.get("/v1/stats").status == 200
        gone(old[0].sock)
        deadline = time.monotonic() + 20
        with contextlib.suppress(OSError, http.client.HTTPException):
            while time.monotonic() < deadline:  # asking again and again holds no place either
                assert old[1].get("/v1/stats").status == 401
        assert time.monotonic() < deadline
        for client in old:
            client.close()


WAITS_FOR = """
import asyncio, pathlib
from kvslot.api.admin import app, guard
class Waits:
    def __getattr__(self, name):
        return getattr(asyncio, name)
    async def sleep(self, seconds):
        while not pathlib.Path({path!r}).exists():
            await asyncio.sleep(0.01)
app.asyncio = Waits()
guard.Guarded.charge = lambda self, now, known: 1.0 if self.room.tokens else 0.0
"""


@pytest.mark.parametrize("waits", ["its turn", "its arguments"])
def test_an_act_that_waits_is_refused_once_its_token_is_gone(tmp_path: Path, waits: str) -> None:
    """Who it is is asked again after each wait, so that nothing is done by a token that a reload has taken away."""
    file, turn = write(tmp_path / "a", ACT), tmp_path / "turn"
    first = WAITS_FOR.format(path=str(turn)) if waits == "its turn" else ""
    with running(first=first, admin_tcp="127.0.0.1:0", admin_act_token_file=file) as daemon:
        head = f"POST /v1/acts/log-level HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ACT}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 17\r\n\r\n"
        with connect(tcp_of(daemon)) as sock, Client(daemon.socket.with_name("admin.sock")) as local:
            sock.sendall(head.encode())
            asked = 1
            while local.get("/v1/stats").json()["admin"]["requests"] == asked:
                asked += 1
            file.write_text(f"{ACT}-new\n")
            assert "no longer: " in reload(daemon).taken[0]
            turn.touch()
            sock.sendall(b'{"level":"error"}')
            sock.shutdown(socket.SHUT_WR)
            assert gone(sock).startswith(b"HTTP/1.1 401 ")
            assert local.get("/v1/stats").json()["log_level"] == "info"


def test_unknown_tokens_are_told_with_who_showed_them(tmp_path: Path) -> None:
    """A line has the peer's address and never the token; a hundred are some lines, and none showed none."""
    file = write(tmp_path / "v", VIEW)
    with running(admin_tcp="127.0.0.1:0", admin_token_file=file) as daemon:
        with Client(tcp_of(daemon)) as client:
            assert client.get("/readyz").status == 401
            assert '"admin_token_unknown"' not in daemon.text()
            port = client.sock.getsockname()[1]
            for _ in range(30):
                assert client.get("/readyz", Authorization=f"Bearer {ACT}").status == 401
        lines = [json.loads(line) for line in daemon.text().splitlines() if '"admin_token_unknown"' in line]
        assert 1 <= len(lines) <= TOKEN_LINES
        assert lines[0]["peer"] == f"127.0.0.1:{port}"
        assert lines[0]["level"] == "warning"
        assert ACT not in daemon.text()


def test_the_api_can_be_switched_off() -> None:
    """Then there is no socket of it, and the daemon serves engines all the same."""
    with running(admin=False) as daemon:
        assert not daemon.socket.with_name("admin.sock").exists()
        assert '"admin_ready"' not in daemon.text()


def test_a_socket_of_another_daemon_is_left_alone() -> None:
    """S59: of two daemons in a folder the second has no API, and says so; a reload has it once the first has ended."""
    with running() as first:
        admin = first.socket.with_name("admin.sock")
        settings: list[dict[str, Any]] = [{}, {"admin_socket": admin}]
        for named in settings:
            with running(socket=first.socket.with_name("t"), **named) as second:
                served(second)
                line = shut(second, "admin_socket")
                assert "is served by another" in line["reason"]
                assert line["level"] == ("error" if named else "warning")
                with Client(admin) as client:
                    assert client.get("/v1/stats").json()["pid"] == first.pid
                if named:
                    assert "is served by another" in reload(second).failed[0]
                    assert first.stop() == 0
                    assert "admin_socket: served at" in reload(second).taken[0]
                    with Client(admin) as client:
                        assert client.get("/v1/stats").json()["pid"] == second.pid


def tcp_of(daemon: Running) -> tuple[str, int]:
    """Where it serves TCP, by its log."""
    line = [line for line in daemon.text().splitlines() if '"admin_ready"' in line][-1]
    host, _, port = json.loads(line)["tcp"].rpartition(":")
    return host, int(port)


def test_strangers_on_tcp_lock_nobody_out(tmp_path: Path) -> None:
    """However many show no token, who has one gets in; they are closed soon; the Unix socket is another room."""
    hasty = "from kvslot.api.admin import guard; guard.STRANGER_SECONDS = 0.5"
    file = write(tmp_path / "v", VIEW)
    with running(first=hasty, admin_tcp="127.0.0.1:0", admin_token_file=file, admin_connections=4) as daemon:
        where = tcp_of(daemon)
        held: list[socket.socket] = []
        ended = threading.Event()

        def crowd() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    held.append(connect(where))
                    held[-1].sendall(b"GET /readyz HTTP/1.1\r\n")
                if len(held) > 300:
                    held.pop(0).close()

        crowds = threading.Thread(target=crowd)
        crowds.start()
        try:
            deadline = time.monotonic() + 30
            while '"admin_crowded"' not in daemon.text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for _ in range(3):
                with Client(daemon.socket.with_name("admin.sock")) as client:
                    assert client.get("/healthz").status == 200
            for _ in range(3):
                with Client(where, {"Authorization": f"Bearer {VIEW}"}) as client:
                    assert client.get("/healthz").status == 200
            inside = [Client(where, {"Authorization": f"Bearer {VIEW}"}) for _ in range(4)]
            for client in inside:
                assert client.get("/healthz").status == 200
            with Client(where, {"Authorization": f"Bearer {VIEW}"}) as client:
                assert client.get("/healthz").code == "too_many_connections"
            made = time.monotonic()
            while time.monotonic() - made < 2.0:  # beyond what strangers have
                time.sleep(0.1)
            for client in inside:
                assert client.get("/healthz").status == 200
                client.close()
        finally:
            ended.set()
            crowds.join()
            for sock in held:
                gone(sock)
                sock.close()


def test_requests_are_charged_to_those_who_ask() -> None:
    """Who has no token waits behind its like, 5 s at most, and those who have one do not wait for them."""
    room = guard.Room(0.0, tokens=True)
    waits = [room.strangers.take(0.0) for _ in range(10_000)]
    assert waits[0] == 0.0
    assert 0.0 < waits[-1] <= guard.WAIT_MOST
    assert room.requests.take(0.0) == 0.0
