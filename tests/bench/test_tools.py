"""The C tools: they compile, the echo answers as it is told, and the load generator plays, times and counts aright."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvslot import benchmarks
from kvslot.api.wire import HEAD, Reader, decode_request, encode, messages
from kvslot.benchmarks import tools
from kvslot.benchmarks.tools import Echo, Frame, Load, Player, Unavailable, build

from ..tools.compiler import needs_compiler

HELLO, ALLOCATE, FREE = 1, 2, 4
PROMPT = bytes(range(240))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("tools"))


def script(rate: float = 0.0) -> Player:
    """A client that allocates and frees."""
    allocate = encode(messages.Allocate(ALLOCATE, 1, 1, PROMPT))
    return Player(
        [Frame(HELLO, encode(messages.Hello(HELLO, 1, "test")))],
        [
            Frame(ALLOCATE, allocate, (allocate.index(PROMPT) + 8,)),
            Frame(FREE, encode(messages.Free(FREE, 1))),
        ],
        rate,
    )


def served(
    path: Path, answer: Callable[[messages.Request, int], list[bytes]]
) -> tuple[threading.Thread, list[messages.Request]]:
    """A server of one connection in a thread, with what it has been asked."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    asked: list[messages.Request] = []

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            reader = Reader()
            while data := sock.recv(1 << 16):
                for body in reader.feed(data):
                    asked.append(decode_request(body))
                    for frame in answer(asked[-1], len(asked)):
                        sock.sendall(frame)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, asked


@needs_compiler
def test_what_is_compiled_is_kept(tmp_path: Path) -> None:
    """A second build compiles nothing."""
    first = {name: tool.stat().st_mtime_ns for name, tool in build(tmp_path).items()}
    again = {name: tool.stat().st_mtime_ns for name, tool in build(tmp_path).items()}
    assert first == again
    assert set(first) == set(tools.TOOLS)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is measured then, and every group says what is missing and what would help."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(Unavailable, match="apt-get install gcc"):
        build(tmp_path)
    document = benchmarks.run_rpc(["one", "death"], quick=True, fifo=False)
    assert document.results == []
    assert set(document.meta.skipped) == {"one", "death"}
    assert "C compiler" in document.meta.skipped["one"]


@needs_compiler
def test_replies_have_the_length_of_their_kind(compiled: dict[str, Path], tmp_path: Path) -> None:
    """The echo answers each request with as many bytes as it was told for its kind, whatever comes together."""
    with Echo(compiled, tmp_path / "echo", {0: 20, ALLOCATE: 300, FREE: 11}):
        sock = socket.socket(socket.AF_UNIX)
        with sock:
            sock.connect(str(tmp_path / "echo"))
            player = script()
            sock.sendall(b"".join(each.frame for each in (*player.setup, *player.cycle)))
            lengths: list[int] = []
            reader = Reader()
            while len(lengths) < 3:
                lengths += [HEAD + len(body) for body in reader.feed(sock.recv(4096))]
    assert lengths == [20, 300, 11]


@needs_compiler
def test_a_closed_loop_takes_the_time_of_every_reply(compiled: dict[str, Path], tmp_path: Path) -> None:
    """Kinds come by turns, none is lost, and mean reply lengths are those of the server."""
    with (
        Echo(compiled, tmp_path / "echo", {ALLOCATE: 300, FREE: 11}) as echo,
        Load(compiled, echo.socket, [script()] * 3, tmp_path) as load,
    ):
        found = load.run(0.1)
        again = load.run(0.05)
    assert found.errors == found.laters == found.pushes == 0
    assert found.reply_bytes == {ALLOCATE: 300.0, FREE: 11.0}
    for client in range(3):
        kinds = found.samples["kind"][found.samples["client"] == client]
        assert len(kinds) > 10
        assert np.array_equal(kinds[:-1] + kinds[1:], np.full(len(kinds) - 1, ALLOCATE + FREE))
    assert np.all(np.diff(found.latencies_us([ALLOCATE, FREE])) >= 0)
    assert again.began_ns > found.began_ns


@needs_compiler
def test_an_open_loop_keeps_its_timetable(compiled: dict[str, Path], tmp_path: Path) -> None:
    """So many frames are sent as were due, and how long a reply took counts from when its request was due."""
    with (
        Echo(compiled, tmp_path / "echo", {}) as echo,
        Load(compiled, echo.socket, [script(500.0)] * 4, tmp_path) as load,
    ):
        found = load.run(0.4)
    assert 760 <= len(found.samples) <= 804  # 4 x 500 x 0.4, and what the last wake-up missed


@needs_compiler
def test_patches_make_every_prompt_new(compiled: dict[str, Path], tmp_path: Path) -> None:
    """The same entry is never sent twice with the same tokens, and nothing else of it changes."""
    thread, asked = served(tmp_path / "socket", lambda request, _: [encode(messages.Done(request.id))])
    with Load(compiled, tmp_path / "socket", [script()], tmp_path) as load:
        load.run(0.02)
    thread.join(5.0)
    prompts = [each.tokens for each in asked if isinstance(each, messages.Allocate)]
    assert len(prompts) > 2
    assert len({prompt[8:12] for prompt in prompts}) == len(prompts)
    assert {prompt[:8] + prompt[12:] for prompt in prompts} == {PROMPT[:8] + PROMPT[12:]}


@needs_compiler
def test_pushes_are_skipped_and_refusals_counted(
    compiled: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A push is no reply, wherever it comes; an Error, a Later and a Never are replies and are told apart."""

    def answer(request: messages.Request, count: int) -> list[bytes]:
        push = encode(messages.Ready(7))
        match request:
            case messages.Allocate() if count % 4 == 2:
                return [push, encode(messages.Error(request.id, 1, "no")), push]
            case messages.Allocate():
                return [encode(messages.Later(request.id, 1, "", 0, 0, 0, 0, 5))]
            case _:
                return [encode(messages.Done(request.id))]

    _, asked = served(tmp_path / "socket", answer)
    with Load(compiled, tmp_path / "socket", [script()], tmp_path) as load:
        found = load.run(0.02)
    allocates = sum(isinstance(each, messages.Allocate) for each in asked)
    assert len(found.samples) == len(asked) - 1
    assert found.errors + found.laters == allocates
    assert abs(found.errors - found.laters) <= 1
    assert abs(found.pushes - 2 * found.errors) <= 1
    assert "refused" in capfd.readouterr().err


@needs_compiler
def test_a_frame_larger_than_the_socket_holds_goes_through(compiled: dict[str, Path], tmp_path: Path) -> None:
    """A prompt of 128k tokens leaves in parts, and the others are served meanwhile."""
    prompt = bytes(4 * 131072)
    large = Frame(ALLOCATE, encode(messages.Allocate(ALLOCATE, 1, 1, prompt)))
    with (
        Echo(compiled, tmp_path / "echo", {}) as echo,
        Load(compiled, echo.socket, [Player([], [large]), script()], tmp_path) as load,
    ):
        found = load.run(0.1)
    assert {0, 1} == set(found.samples["client"].tolist())
