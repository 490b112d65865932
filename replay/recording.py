"""A recording of a daemon's live load, made into a `kvstruct-1` trace as it goes.

    fetched events ──► requests under way ──► in order of arrival ──► prefix trees ──► lines ──► file

A daemon tells what its clients ask (`messages.Noted`): a prompt, tokens that followed, the end.  A trace wants less and
more: no token, but for each request an earlier one with the longest common prefix.  So the tokens of all requests are
kept in a radix tree for each namespace, token-exact, and a line is written once all requests that came before are known
in full.  Whoever is still running holds back the lines of those that came later; at the end all are written as far as
they are known.

    node   [ label: tokens ]   first, last: the first and the latest request whose sequence passes through it

Memory: `memory_bytes` for the trees.  Beyond it the leaves used longest ago go, and what a later request would have had
in common with them is not seen; `forgotten_tokens` says how many went.  A quarter as much again for requests whose
lines wait for an earlier one to end; beyond it that one is cut off where it is, so that one hung engine holds up none.

Sessions of a trace are conversations, whose requests follow each other; a daemon knows engines.  A request that goes on
where an ended one stopped (it has more in common with it than its prompt) is the next of that one's session; any other
one opens a session of its own.

Forks.  A child that goes on where its parent ended is the same request under another name, as beams have it after each
step; one that ended without a token of its own was nothing.  What is left are branches, each a request whose prompt is
what it shares.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

from kvslot.allocator.tree import common_prefix
from kvslot.api.wire import messages
from kvslot.replay.traces import FORMAT, SUFFIX, RecordedLoad, RecordedPool

TOKENS_FORMAT: Final = "kvtokens-1"
MEMORY_BYTES: Final = 1 << 30
NODE_BYTES: Final = 400
"""Of a node beside its label: the object, its dict, its entry in the parent's."""
KEEP: Final = 0.9
"""Of the memory, what is left when the oldest leaves have gone."""
FLUSH_LINES: Final = 4096
FLUSH_S: Final = 2.0


class Node:
    """An edge of a tree and the node it leads to."""

    __slots__ = ("children", "first", "label", "last", "parent")

    def __init__(self, label: bytes, parent: Node | None, request: int) -> None:
        self.label = label
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.first = request
        self.last = request


class Forest:
    """The sequences seen so far, a tree for each namespace."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self.bytes = 0
        self.forgotten_tokens = 0
        self._most = memory_bytes
        self._roots: dict[int, Node] = {}

    def place(self, space: int, tokens: bytes, request: int) -> tuple[int, int, int]:
        """Adds a sequence: tokens it has in common with an earlier one, and the first and the latest of those (-1)."""
        node = self._roots.get(space)
        if node is None:
            node = self._roots[space] = Node(b"", None, -1)
        at, size = 0, len(tokens)
        first = last = -1
        while at < size:
            child = node.children.get(tokens[at : at + 4])
            if child is None:
                self._add(node, tokens[at:], request)
                break
            common = common_prefix(tokens, at, child.label, 4)
            if common < len(child.label):
                child = self._split(child, common)
            at += common
            first, last = child.first, child.last
            child.last = request
            node = child
        if self.bytes > self._most:
            self._forget()
        # What was split off keeps whom it had; of the rest this request is the first.
        return at >> 2, first, last

    def recount(self) -> int:
        """`bytes`, counted from nothing."""
        found, stack = 0, list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            found += len(node.label) + NODE_BYTES if node.parent is not None else 0
        return found

    def _add(self, node: Node, label: bytes, request: int) -> None:
        node.children[label[:4]] = Node(label, node, request)
        self.bytes += len(label) + NODE_BYTES

    def _split(self, node: Node, at: int) -> Node:
        """The upper half of a node cut after `at` bytes of its label."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.label[:at], parent, node.first)
        upper.last = node.last
        node.label = node.label[at:]
        node.parent = upper
        upper.children[node.label[:4]] = node
        parent.children[upper.label[:4]] = upper
        self.bytes += NODE_BYTES
        return upper

    def _forget(self) -> None:
        """Drops leaves, the one used longest ago first, and what becomes a leaf by that in its turn."""
        leaves = [(leaf.last, number, leaf) for number, leaf in enumerate(self._leaves())]
        heapq.heapify(leaves)
        number = len(leaves)
        while leaves and self.bytes > KEEP * self._most:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.label[:4]]
            self.bytes -= len(leaf.label) + NODE_BYTES
            self.forgotten_tokens += len(leaf.label) >> 2
            if parent.parent is not None and not parent.children:
                number += 1
                heapq.heappush(leaves, (parent.last, number, parent))

    def _leaves(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack += node.children.values()
            elif node.parent is not None:
                yield node


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A request of the trace; see docs/replay.md."""

    t: float
    session: int
    turn: int
    parent: int
    keep: int
    prompt_len: int
    output_len: int


class Own(msgspec.Struct, frozen=True, array_like=True):
    """The token ids that a request does not inherit, as far as they are known, for who asked for values."""

    request: int
    position: int
    tokens: list[int]


class _Request:
    """One request while it is under way, or waits for those that came before it."""

    __slots__ = (
        "at",
        "children",
        "counted",
        "ended_at",
        "hit",
        "length",
        "nothing",
        "number",
        "over",
        "prompt",
        "session",
        "space",
        "tokens",
        "whole",
    )

    def __init__(self, at: float, session: int, space: int, prompt: int, hit: int, tokens: bytearray) -> None:
        self.at = at
        self.session = session
        self.space = space
        self.prompt = prompt
        self.hit = hit  # -1: a fork, which looks nothing up
        self.tokens = tokens
        self.whole = True  # what is known has no gap; behind one nothing more is taken
        self.length = prompt
        self.over = False
        self.ended_at = float("inf")
        self.children: list[tuple[int, _Request]] = []  # forks: tokens shared, and each itself
        self.nothing = False  # a fork that has no line of its own
        self.number = 0  # the daemon's
        self.counted = 0  # of `Recording._held`


class _Past:
    """What is remembered of a request that has its line."""

    __slots__ = ("ended_at", "known", "prompt", "session", "total", "turn")

    def __init__(self, prompt: int, total: int, known: int, ended_at: float, session: int, turn: int) -> None:
        self.prompt = prompt
        self.total = total
        self.known = known
        self.ended_at = ended_at
        self.session = session
        self.turn = turn


class Recording:
    """What was recorded so far.  `feed` takes what was fetched and returns the lines that are complete by that."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, values: bool = False) -> None:
        self.forest = Forest(memory_bytes)
        self.values = values
        self.requests = 0
        """That have their lines."""
        self.begun = 0
        self.running = 0
        self.waiting = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.hit_tokens = 0
        self.hit_before = 0
        """Of them, found though no request of the recording had them: cached before it began."""
        self.forks = 0
        self.fork_tokens = 0
        """What they share: in the trace their prompts, of which nothing was looked up."""
        self.cut_off = 0
        """Running at the end: their outputs are as long as they were then."""
        self.lost_requests = 0
        self.lost_tokens = 0
        self.never = 0
        self.given_up = 0
        self.boots = 0
        self.engines: set[tuple[int, int]] = set()
        self.spaces: set[int] = set()
        self._before = [0, 0, 0, 0]  # those four counts, of earlier boots
        self._start: float | None = None
        self._shift = 0.0  # of this boot's clock
        self._now = 0.0
        self._under_way: dict[int, _Request] = {}
        self._line: list[tuple[float, int, _Request]] = []
        self._arrivals = 0
        self._past: list[_Past] = []
        self._latest: dict[int, int] = {}  # session of the trace -> its latest request
        self._sessions = 0
        self._pace = Pace()
        self._held_most = memory_bytes >> 2
        self._held = 0  # bytes of tokens that requests without a line were told with
        self._written_at = 0.0

    @property
    def seconds(self) -> float:
        """Since the recording began."""
        return self._now - (self._start or 0.0) if self._start is not None else 0.0

    @property
    def held_back(self) -> int:
        """Requests whose lines wait for earlier ones to end."""
        return len(self._line)

    def begin(self, at: float, wall: float) -> None:
        """A boot of the daemon, whose clock reads `at` when that of this process reads `wall`.

        Later ones go on with the recording: what was asked of them has in common with what was asked before what it
        has, as long as all were given the same key.
        """
        self.boots += 1
        if self._start is None:
            self._start = at
            self._wall = wall
        # A daemon that came back on another machine's clock would still follow on.
        self._shift = self._start + (wall - self._wall) - at

    def feed(self, told: messages.Recorded) -> list[Line | Own]:
        """Takes over what was fetched."""
        for event in told.events:
            self._take(event)
        self._now = max(self._now, told.at + self._shift)
        self.running, self.waiting = told.running, told.waiting
        for index, name in enumerate(("lost_requests", "lost_tokens", "never", "given_up")):
            setattr(self, name, self._before[index] + getattr(told, name))
        return self._settle(told.floor + self._shift)

    def end(self) -> list[Line | Own]:
        """Nothing more comes from this boot of the daemon: what is under way ends here, as far as it is known."""
        while self._under_way:
            self._cut_off(self._under_way.popitem()[1])
        self._before = [self.lost_requests, self.lost_tokens, self.never, self.given_up]
        self.running = self.waiting = 0
        return self._settle(float("inf"))

    def pace(self) -> tuple[float, float] | None:
        """Microseconds a computed prompt token and milliseconds an output token took; None: that cannot be told."""
        return self._pace.found()

    def _take(self, event: messages.Noted) -> None:
        match event.what:
            case "begun":
                at = max(event.at + self._shift, self._start or 0.0)
                request = _Request(
                    at, event.session, event.space, event.count, event.hit, bytearray(event.tokens)
                )
                self._enter(event.request, request)
            case "forked":
                parent = self._under_way.get(event.space)
                if parent is None:
                    return
                known = parent.tokens[: 4 * event.count]
                at = event.at + self._shift
                request = _Request(at, event.session, parent.space, event.count, -1, known)
                request.whole = len(known) == 4 * event.count
                parent.children.append((event.count, request))
                self._enter(event.request, request)
            case "told":
                found = self._under_way.get(event.request)
                if found is None or not found.whole:
                    return
                known_to = len(found.tokens) >> 2
                if event.count > known_to:
                    found.whole = False
                    return
                del found.tokens[4 * event.count :]
                found.tokens += event.tokens
                found.counted += len(event.tokens)
                self._held += len(event.tokens)
            case "cut":
                found = self._under_way.get(event.request)
                if found is not None:
                    self._cut(found, event.count)
            case "ended":
                found = self._under_way.pop(event.request, None)
                if found is not None:
                    self._over(found, event.count, event.at + self._shift)
            case "left":
                gone = [number for number, each in self._under_way.items() if each.session == event.session]
                for number in gone:
                    each = self._under_way.pop(number)
                    self._over(each, len(each.tokens) >> 2, event.at + self._shift)
            case _:
                pass  # of a newer daemon

    def _enter(self, number: int, request: _Request) -> None:
        request.number = number
        self._under_way[number] = request
        request.counted = len(request.tokens)
        self._held += request.counted
        self.begun += 1
        self._arrivals += 1
        self.engines.add((self.boots, request.session))
        heapq.heappush(self._line, (request.at, self._arrivals, request))

    def _cut(self, request: _Request, keep: int) -> None:
        """Rolled back to `keep`.  What was looked up stays the prompt: what is written over it is not followed."""
        if keep < request.prompt:
            request.whole = False
        elif keep < len(request.tokens) >> 2:
            del request.tokens[4 * keep :]
        request.length = max(request.prompt, min(request.length, keep))

    def _over(self, request: _Request, length: int, at: float) -> None:
        if request.hit < 0 and length <= request.prompt and not request.children:
            request.nothing = request.over = True
            return
        for shared, child in request.children:
            if shared == length and not child.nothing:
                self._go_on(request, child)
                return
        request.children.clear()
        request.over = True
        request.length = max(request.prompt, length)
        request.ended_at = at
        if len(request.tokens) > 4 * request.length:
            del request.tokens[4 * request.length :]

    def _go_on(self, request: _Request, child: _Request) -> None:
        """A request has ended where a fork of it goes on, or went on: from here on that is the request."""
        child.nothing = True
        request.tokens, request.whole = child.tokens, child.whole
        request.children = child.children
        if child.over:
            request.over, request.length, request.ended_at = True, child.length, child.ended_at
        else:
            request.number = child.number
            self._under_way[request.number] = request

    def _settle(self, floor: float) -> list[Line | Own]:
        """The lines of requests that ended, up to the first that has not."""
        lines: list[Line | Own] = []
        waiting = self._line
        while self._held > self._held_most and waiting:
            request = heapq.heappop(waiting)[2]
            if not request.over and not request.nothing:
                self._cut_off(request)
            self._write_or_not(request, lines)
        while waiting and (waiting[0][2].over or waiting[0][2].nothing) and waiting[0][0] <= floor:
            self._write_or_not(heapq.heappop(waiting)[2], lines)
        return lines

    def _cut_off(self, request: _Request) -> None:
        """Ends a request where it is, and where it goes on as a fork of it, that, too."""
        while not request.over:
            self._under_way.pop(request.number, None)
            self._over(request, max(request.length, len(request.tokens) >> 2), float("inf"))
        if not request.nothing:
            self.cut_off += 1

    def _write_or_not(self, request: _Request, lines: list[Line | Own]) -> None:
        self._held -= request.counted
        if not request.nothing:
            self._write(request, lines)

    def _write(self, request: _Request, lines: list[Line | Own]) -> None:
        index = self.requests
        tokens = bytes(request.tokens)
        total = max(request.prompt, request.length, len(tokens) >> 2)
        keep, first, last = self.forest.place(request.space, tokens, index)
        parent = -1
        if keep:
            # The first where the latest had not ended: who asks for a prompt while another one answers it does not
            # wait for that answer.
            ended = self._past[last].ended_at <= request.at
            parent = last if ended else first
        session, turn = self._session(request, parent, keep)
        self._latest[session] = index
        self._past.append(_Past(request.prompt, total, len(tokens) >> 2, request.ended_at, session, turn))
        self.requests += 1
        self.spaces.add(request.space)
        self.prompt_tokens += request.prompt
        self.output_tokens += total - request.prompt
        if request.hit < 0:
            self.forks += 1
            self.fork_tokens += request.prompt
        else:
            self.hit_tokens += request.hit
            self.hit_before += max(0, request.hit - min(keep, request.prompt - 1))
            self._pace.note(
                request.prompt - request.hit, total - request.prompt, request.ended_at - request.at
            )
        # One that was cut off may have come after one that is told of only now.
        self._written_at = max(self._written_at, round(request.at - (self._start or 0.0), 6))
        lines.append(
            Line(
                self._written_at,
                session,
                turn,
                parent,
                keep,
                request.prompt,
                total - request.prompt,
            )
        )
        if self.values:
            own = memoryview(tokens)[4 * keep :].cast("i").tolist() if len(tokens) > 4 * keep else []
            lines.append(Own(index, keep, own))

    def _session(self, request: _Request, parent: int, keep: int) -> tuple[int, int]:
        """The conversation that a request goes on with, and its number in it."""
        if parent >= 0:
            past = self._past[parent]
            # An answer that was never told of ends what can be seen of its conversation at its prompt.
            whole = keep > past.prompt or (keep == past.prompt == past.known < past.total)
            if whole and past.ended_at <= request.at and self._latest[past.session] == parent:
                return past.session, past.turn + 1
        self._sessions += 1
        return self._sessions - 1, 0


class Pace:
    """How long a request takes, as a × prompt tokens computed + b × output tokens, by least squares."""

    LEAST: Final = 20

    def __init__(self) -> None:
        self._n = 0
        self._pp = self._po = self._oo = self._pt = self._ot = 0.0

    def note(self, computed: int, output: int, seconds: float) -> None:
        """One request."""
        if 0 < seconds < 1e6:
            self._n += 1
            self._pp += computed * computed
            self._po += computed * output
            self._oo += output * output
            self._pt += computed * seconds
            self._ot += output * seconds

    def found(self) -> tuple[float, float] | None:
        """Microseconds a prompt token, milliseconds an output token."""
        determinant = self._pp * self._oo - self._po * self._po
        if self._n < self.LEAST or determinant <= 1e-6 * self._pp * self._oo:
            return None
        prompt = (self._pt * self._oo - self._ot * self._po) / determinant
        output = (self._ot * self._pp - self._pt * self._po) / determinant
        if prompt <= 0 or output <= 0:
            return None
        return round(1e6 * prompt, 3), round(1e3 * output, 4)


# -- the file ---------------------------------------------------------------------------------------------------------


class TraceFile:
    """A trace that can be read at any time while it grows: a gzip member for its header, and one for each flush.

    With `values`, a second file beside it takes the tokens.  `close` writes the final header: into a copy that takes
    the trace's place, so that an interrupted one leaves the trace as it was.
    """

    def __init__(self, path: Path, values: Path | None = None, *, replace: bool = False) -> None:
        """Raises FileExistsError for a file that is there, unless `replace`; OSError where it cannot be written."""
        self.path = path
        self.name = path.name.removesuffix(SUFFIX)
        self._lines: list[bytes] = []
        self._owns: list[bytes] = []
        self._flushed = time.monotonic()
        self._encode = msgspec.json.Encoder().encode
        self._values: IO[bytes] | None = None
        self._values_path = values
        self._file = _create(path, replace=replace, mode=0o666)
        try:
            if values is not None:
                self._values = _create(values, replace=replace, mode=0o600)
        except OSError:
            self._file.close()
            path.unlink()
            raise
        head = self._header(RecordedLoad(complete=False))
        self._body = self._member(self._file, head)
        if self._values is not None:
            text = {"format": TOKENS_FORMAT, "trace": self.name}
            self._member(self._values, json.dumps(text).encode() + b"\n")

    def add(self, lines: Iterable[Line | Own]) -> None:
        """Takes lines, and writes them when there are many or the last time was a while ago."""
        for each in lines:
            (self._lines if isinstance(each, Line) else self._owns).append(self._encode(each))
        if len(self._lines) >= FLUSH_LINES or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Writes what there is, as members that are complete."""
        self._flushed = time.monotonic()
        if self._lines:
            self._member(self._file, b"\n".join(self._lines) + b"\n")
            self._lines.clear()
        if self._owns and self._values is not None:
            self._member(self._values, b"\n".join(self._owns) + b"\n")
            self._owns.clear()

    def close(self, load: RecordedLoad) -> None:
        """The end: the header gets what is known by now."""
        self.flush()
        self._file.close()
        if self._values is not None:
            self._values.close()
        if not self._regular():
            return  # a pipe has its header behind it
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(self.path, "rb") as source, open(beside, "xb") as out:
                os.fchmod(out.fileno(), os.fstat(source.fileno()).st_mode & 0o777)
                self._member(out, self._header(load))
                source.seek(self._body)
                shutil.copyfileobj(source, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Takes away what was begun and holds no request."""
        self._file.close()
        if self._regular():
            self.path.unlink(missing_ok=True)
        if self._values is not None:
            self._values.close()
            if self._values_path is not None and self._values_path.is_file():
                self._values_path.unlink()

    def _regular(self) -> bool:
        return self.path.is_file()

    def _header(self, load: RecordedLoad) -> bytes:
        head: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "kind": "recorded load",
            "granularity": "token",
            "note": load.note(),
            "recorded": msgspec.to_builtins(load),
        }
        return json.dumps(head).encode() + b"\n"

    @staticmethod
    def _member(file: IO[bytes], data: bytes) -> int:
        """Writes one gzip member in one go; its length."""
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as out:
            out.write(data)
        file.write(packed.getvalue())
        file.flush()
        return packed.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._values is not None:
            self._values.close()


def _create(path: Path, *, replace: bool, mode: int) -> IO[bytes]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
    if path.exists() and not path.is_file():
        flags = os.O_WRONLY | os.O_CLOEXEC  # a pipe, /dev/null
    return os.fdopen(os.open(path, flags, mode), "wb")


def load_of(recording: Recording, pool: RecordedPool | None, *, complete: bool) -> RecordedLoad:
    """What a trace's header says of how it came to be."""
    pace = recording.pace()
    return RecordedLoad(
        complete=complete,
        until=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(recording.seconds, 3),
        requests=recording.requests,
        prompt_tokens=recording.prompt_tokens,
        output_tokens=recording.output_tokens,
        hit_tokens=recording.hit_tokens,
        hit_tokens_before=recording.hit_before,
        engines=len(recording.engines),
        namespaces=len(recording.spaces),
        boots=recording.boots,
        forks=recording.forks,
        fork_tokens=recording.fork_tokens,
        cut_off=recording.cut_off,
        never=recording.never,
        given_up=recording.given_up,
        lost_requests=recording.lost_requests,
        lost_tokens=recording.lost_tokens,
        forgotten_tokens=recording.forest.forgotten_tokens,
        prefill_us=pace[0] if pace else None,
        decode_ms=pace[1] if pace else None,
        pool=pool,
    )
