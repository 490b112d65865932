"""Recorded serving traces: read, check, and turn into token ids.

A `kvstruct-1` trace is a gzip'd text file: a JSON header, then one JSON list per request in arrival order,

    [t_seconds | null, session, turn, parent, keep, prompt_len, output_len]

It holds no text, only how requests build on each other: seq(r) = prompt + output = seq(parent)[:keep] + fresh tokens,
where the parent is an earlier request with the longest common prefix.  `keep` may pass `prompt_len` (the same prompt
asked again, and the answer starts the same).  Fresh ids are a pure function of (request, part, position), so equal ids
mean a shared prefix, and the prefix tree over the ids has the node lengths of the recorded one.

Owners.  Every request *owns* the positions it did not inherit, keep..total.  Following parents, most ancestors
contribute nothing to a given prefix (in a chat all of 2,000 conversations may chain through one system prompt), so the
trace keeps for each request its `owner`: the nearest ancestor whose own part starts below `keep`.

    seq(r):   [ owner's owner's part | owner's part | r's own part )
              0            keep(owner)         keep(r)          total(r)

Along owners `keep` falls strictly, so a walk visits only requests that contribute.  All walks are loops.

Rounds.  A trace can be gone through more than once (`--hours`): round 1 has new sessions, whose fresh ids differ from
round 0's.  What sessions of the trace share with each other (system prompts, few-shot examples) is the same in every
round: of the part that a request owns, the positions below `shared` keep their ids of round 0, where `shared` is the
furthest position that a request of another session inherits.  Within a round the tree's shape is unchanged, and two
rounds meet exactly in what is shared.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

SUFFIX: Final = ".kvs.gz"
FORMAT: Final = "kvstruct-1"

LINE_BYTES_MAX: Final = 1 << 16
"""A header or a request takes a few hundred bytes; a file of one endless line must not fill memory."""
REQUESTS_MAX: Final = 10_000_000
"""About 1 GB of lists; a longer recording is better cut."""
TOKENS_MAX: Final = 1 << 26
"""Longest sequence: 64 M tokens are 256 MB of ids, far beyond any model's context."""
CACHE_BYTES: Final = 256 << 20
"""Sequences the expander keeps: room for some hundred conversations of 100k tokens."""

_BUNDLED: Final = Path(__file__).parent / "data"


class TraceError(ValueError):
    """A trace cannot be used.  `path`, `line` (1 is the header; None: the file as a whole), `problem`, `remedy`."""

    def __init__(self, path: Path | str, line: int | None, problem: str, remedy: str) -> None:
        self.path = str(path)
        self.line = line
        self.problem = problem
        self.remedy = remedy
        where = self.path if line is None else f"{self.path}, line {line}"
        super().__init__(f"{where}: {problem}. {remedy}")


class TraceNotFound(TraceError):
    """No such file, and no bundled trace of that name."""


class TraceUnreadable(TraceError):
    """The file cannot be read or unpacked: permissions, not gzip, cut short, damaged."""


class TraceHeaderError(TraceError):
    """The first line is not the header of a kvstruct-1 trace."""


class TraceRequestError(TraceError):
    """A request's line is malformed or contradicts the lines before it."""


class RecordedPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of a daemon whose load was recorded, as it was then.  Sizes in slots."""

    name: str = ""
    granularity: str = "token"
    blocks: int = 0
    block_size: int = 0
    usable: int = 0
    quantum: int = 0
    watermark: int = 0
    eviction: str = "lru"
    append: str = "chain"
    compaction: str = "off"
    slot_bytes: int = 0
    pages: list[int] = []
    """Page sizes of the engines that were connected."""


class RecordedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace came to be that was recorded from a daemon; all counts are of the recording."""

    complete: bool
    """False: the recorder was killed, or is still at it; what is there is whole up to some seconds before."""
    until: str = ""
    """When it ended; UTC, ISO 8601."""
    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that the daemon found cached."""
    hit_tokens_before: int = 0
    """Of them, cached before the recording began: no request of it has them."""
    engines: int = 0
    """Sessions of the daemon that asked."""
    namespaces: int = 0
    boots: int = 1
    """Of the daemon."""
    forks: int = 0
    """Requests that are branches of others: they began as forks, and went another way."""
    fork_tokens: int = 0
    """Their prompts: shared with the others, and nothing that was looked up."""
    cut_off: int = 0
    """Requests that had not ended when the recording did, or held too many others back; outputs as they were then."""
    never: int = 0
    """Told NEVER, and not in the trace."""
    given_up: int = 0
    """Told LATER and not asked for again, and not in the trace."""
    lost_requests: int = 0
    """Not in the trace, since the recorder could not keep up."""
    lost_tokens: int = 0
    forgotten_tokens: int = 0
    """Dropped from what later requests were compared with, for want of memory."""
    prefill_us: float | None = None
    """Microseconds that a prompt token took which was not found, by least squares; None: cannot be told."""
    decode_ms: float | None = None
    """Milliseconds an output token took."""
    pool: RecordedPool | None = None

    def lacks(self) -> list[str]:
        """For people: what is not in the trace as it was, a line each."""
        return [
            f"{words}: {count:,}"
            for words, count in (
                ("requests lost, as the recorder could not keep up", self.lost_requests),
                ("tokens lost with them, or of others", self.lost_tokens),
                ("tokens no longer compared with, for want of memory", self.forgotten_tokens),
                ("requests cut off while they ran, with outputs as long as they were then", self.cut_off),
                ("requests told NEVER, and left out", self.never),
                ("requests given up while they waited, and left out", self.given_up),
                ("branches of requests (forks), which a replay has to look up", self.forks),
                (
                    "hit tokens cached before the recording began, which a replay computes",
                    self.hit_tokens_before,
                ),
            )
            if count
        ]

    def note(self) -> str:
        """The same in one line."""
        return "; ".join(["recorded from a daemon", *self.lacks()])


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a trace."""

    format: str
    name: str = ""
    kind: str = ""
    granularity: str | int = "token"
    note: str = ""
    recorded: RecordedLoad | None = None


class _Line(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    t: float | None
    session: int | str
    turn: int
    parent: int
    keep: int
    prompt_len: int
    output_len: int


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A checked trace as columns, one entry a request, in arrival order.  Lengths are in tokens."""

    name: str
    header: Header
    digest: str
    """SHA-256 of the file."""
    t: list[float] | None
    """Arrival in seconds, never falling; None: the trace knows the order only."""
    session: list[int]
    """Sessions numbered from 0 in order of appearance."""
    parent: list[int]
    """-1: nothing inherited (keep is 0 then)."""
    keep: list[int]
    prompt_len: list[int]
    total: list[int]
    """prompt_len + output_len."""
    owner: list[int]
    """Nearest ancestor with keep below this one's; -1 where keep is 0."""
    previous: list[int]
    """The request before this one in its session; -1: it opens the session."""

    def __len__(self) -> int:
        return len(self.keep)

    @property
    def sessions(self) -> int:
        return max(self.session, default=-1) + 1

    @property
    def max_length(self) -> int:
        """Longest prompt + output."""
        return max(self.total, default=0)

    def head(self, count: int) -> Trace:
        """The first `count` requests, as a trace of its own.  Parents come earlier, so nothing dangles."""
        if count >= len(self):
            return self
        return Trace(
            name=self.name,
            header=self.header,
            digest=self.digest,
            t=None if self.t is None else self.t[:count],
            session=self.session[:count],
            parent=self.parent[:count],
            keep=self.keep[:count],
            prompt_len=self.prompt_len[:count],
            total=self.total[:count],
            owner=self.owner[:count],
            previous=self.previous[:count],
        )

    def shared(self) -> list[int]:
        """Per request: the position below which what it owns is inherited by requests of other sessions."""
        owner, keep, session = self.owner, self.keep, self.session
        shared = [0] * len(keep)
        for i, session_own in enumerate(session):
            end, j = keep[i], owner[i]
            # Whoever reached this far before has walked the rest already; ranges from the root are nested.
            while j >= 0 and shared[j] < end:
                if session[j] != session_own:
                    shared[j] = end
                end, j = keep[j], owner[j]
        return shared


def bundled() -> dict[str, Path]:
    """The traces that come with kvslot, by name."""
    return {path.name.removesuffix(SUFFIX): path for path in sorted(_BUNDLED.glob("*" + SUFFIX))}


def find(name: str) -> Path:
    """The file for a path or the name of a bundled trace.  Raises TraceNotFound.

    A bare name, without a slash or a suffix, is a bundled trace's first: a file of that name that happens to lie here
    does not take its place."""
    path = Path(name)
    known = bundled()
    if "/" not in name and not path.suffix and name in known:
        return known[name]
    if path.is_file():
        return path
    found = known.get(name.removesuffix(SUFFIX))
    if found is not None:
        return found
    if path.is_dir():
        raise TraceUnreadable(name, None, "this is a folder", f"Name a {SUFFIX} file in it")
    raise TraceNotFound(
        name,
        None,
        "no such file or bundled trace",
        f"Give a path, or one of: {', '.join(known) or 'none bundled'}",
    )


def load(path: Path | str) -> Trace:
    """Read and check a trace.

    Raises TraceUnreadable, TraceHeaderError or TraceRequestError; nothing else for any content of the file."""
    path = Path(path)
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as raw:
            while piece := raw.read(1 << 20):
                digest.update(piece)
        with gzip.open(path, "rb") as lines:
            header, requests = _read(path, lines)
    except EOFError as error:
        raise TraceUnreadable(
            path, None, "the gzip stream is cut short", "Copy or download it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceUnreadable(
            path, None, f"not a sound gzip file ({error})", "Traces are gzip'd JSON lines"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceUnreadable(
            path, None, f"cannot be read ({reason})", "Check path and permissions"
        ) from error
    return _columns(path, header, digest.hexdigest(), requests)


def _read(path: Path, lines: gzip.GzipFile) -> tuple[Header, list[_Line]]:
    head = lines.readline(LINE_BYTES_MAX + 1)
    remedy = f'Line 1 must be an object with "format": "{FORMAT}"'
    if not head:
        raise TraceHeaderError(path, 1, "the file is empty", remedy)
    try:
        header = msgspec.json.decode(head, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceHeaderError(path, 1, f"not a trace header ({error})", remedy) from error
    if header.format != FORMAT:
        raise TraceHeaderError(path, 1, f'format is "{header.format}"', f'This version reads "{FORMAT}"')
    decode = msgspec.json.Decoder(_Line).decode
    requests: list[_Line] = []
    number = 1
    while line := lines.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise TraceRequestError(
                path, number, f"longer than {LINE_BYTES_MAX} bytes", "A request is a short list"
            )
        if line.isspace():
            continue
        try:
            requests.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceRequestError(
                path,
                number,
                f"not a request ({error})",
                "A line is [t_seconds or null, session, turn, parent, keep, prompt_len, output_len]",
            ) from error
        _check(path, number, requests)
    if not requests:
        raise TraceRequestError(path, None, "holds no request", "Record at least one")
    return header, requests


def _check(path: Path, line: int, requests: list[_Line]) -> None:
    """The last request against those before it."""
    request = requests[-1]
    index = len(requests) - 1

    def wrong(problem: str, remedy: str) -> TraceRequestError:
        return TraceRequestError(path, line, problem, remedy)

    if index >= REQUESTS_MAX:
        raise wrong(f"more than {REQUESTS_MAX} requests", "Cut the trace into pieces")
    if request.prompt_len < 1:
        raise wrong(f"prompt_len is {request.prompt_len}", "A prompt has at least one token")
    if request.output_len < 0:
        raise wrong(f"output_len is {request.output_len}", "Lengths are 0 or more")
    length = request.prompt_len + request.output_len
    if length > TOKENS_MAX:
        raise wrong(f"prompt and output are {length} tokens", f"The limit is {TOKENS_MAX}")
    if request.keep < 0:
        raise wrong(
            f"keep is {request.keep}", "It is the length of the prefix shared with the parent, 0 or more"
        )
    if request.keep > length:
        raise wrong(f"keep is {request.keep}, the sequence has {length} tokens", "A prefix fits its sequence")
    if request.parent >= index or request.parent < -1:
        raise wrong(
            f"parent is {request.parent}, this is request {index}",
            "A parent is an earlier request, or -1 for none",
        )
    if request.parent < 0 and request.keep:
        raise wrong(
            f"keep is {request.keep} without a parent", "Without a parent nothing is inherited: keep is 0"
        )
    if request.parent >= 0:
        parent = requests[request.parent]
        held = parent.prompt_len + parent.output_len
        if request.keep > held:
            raise wrong(
                f"keep is {request.keep}, parent {request.parent} has {held} tokens",
                "A prefix fits its parent",
            )
    if (request.t is None) != (requests[0].t is None):
        raise wrong("some requests have a time and some have none", "Give all of them one, or none")
    if request.t is not None:
        if not 0 <= request.t < 1e10:  # NaN fails this too; 1e10 s are three centuries
            raise wrong(f"time is {request.t}", "Seconds from the recording's start, 0 or more")
        before = requests[index - 1].t if index else None
        if before is not None and request.t < before:
            raise wrong(f"time {request.t} is before its predecessor's {before}", "Sort requests by arrival")


def _columns(path: Path, header: Header, digest: str, requests: list[_Line]) -> Trace:
    keep = [request.keep for request in requests]
    parent = [request.parent if request.keep else -1 for request in requests]
    owner = [-1] * len(requests)
    for i, k in enumerate(keep):
        j = parent[i]
        # owner[j] is the first ancestor of j below keep[j] >= k: those between are no closer to k.
        while j >= 0 and keep[j] >= k:
            j = owner[j]
        owner[i] = j
    numbers: dict[int | str, int] = {}
    session = [numbers.setdefault(request.session, len(numbers)) for request in requests]
    last: dict[int, int] = {}
    previous: list[int] = []
    for i, s in enumerate(session):
        previous.append(last.get(s, -1))
        last[s] = i
    return Trace(
        name=header.name or path.name.removesuffix(SUFFIX),
        header=header,
        digest=digest,
        t=None if requests[0].t is None else [request.t for request in requests if request.t is not None],
        session=session,
        parent=parent,
        keep=keep,
        prompt_len=[request.prompt_len for request in requests],
        total=[request.prompt_len + request.output_len for request in requests],
        owner=owner,
        previous=previous,
    )


# --- Token ids ---------------------------------------------------------------------------------------------------

_U64: Final = (1 << 64) - 1
_CHUNK: Final = 8192  # two uint64 buffers of 64 KiB: they stay in a core's own cache through the ten passes
_ROUND_SHIFT: Final = 40  # pieces are 2 * request + part, far below; so rounds never meet
_RAMP: Final = np.arange(_CHUNK, dtype=np.uint64)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_VOCAB_MASK: Final = np.uint64((1 << 31) - 1)

Ids = npt.NDArray[np.int32]


class Key(NamedTuple):
    """One request in one round."""

    round: int
    request: int


class Expander:
    """Token ids of a trace's requests, as little-endian int32 bytes, worked out when asked for.

    Keeps the sequences used last, up to `cache_bytes`; any other is put together from the parts of its owners, written
    straight into place.  Memory: the cache, plus the one sequence being built."""

    def __init__(self, trace: Trace, cache_bytes: int = CACHE_BYTES) -> None:
        self._keep: Sequence[int] = trace.keep
        self._owner: Sequence[int] = trace.owner
        self._prompt_len: Sequence[int] = trace.prompt_len
        self._total: Sequence[int] = trace.total
        self._trace = trace
        self._shared: Sequence[int] | None = None
        self._cache: OrderedDict[Key, Ids] = OrderedDict()
        self._cache_bytes = 0
        self._cache_bytes_max = cache_bytes
        self._x = np.empty(_CHUNK, dtype=np.uint64)
        self._y = np.empty(_CHUNK, dtype=np.uint64)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the sequences kept now."""
        return self._cache_bytes

    def prompt(self, request: int, round_: int = 0) -> bytes:
        """The prompt's ids, 4 bytes each."""
        return self.sequence(request, round_)[: self._prompt_len[request]].tobytes()

    def output(self, request: int, round_: int = 0) -> bytes:
        """The output's ids, 4 bytes each."""
        return self.sequence(request, round_)[self._prompt_len[request] :].tobytes()

    def sequence(self, request: int, round_: int = 0) -> Ids:
        """Prompt and output, as an array that must not be written to."""
        key = Key(round_, request)
        cache = self._cache
        found = cache.get(key)
        if found is not None:
            cache.move_to_end(key)
            return found
        built = self._build(request, round_)
        cache[key] = built
        self._cache_bytes += built.nbytes
        while self._cache_bytes > self._cache_bytes_max and len(cache) > 1:
            _, dropped = cache.popitem(last=False)
            self._cache_bytes -= dropped.nbytes
        return built

    def _build(self, request: int, round_: int) -> Ids:
        if round_ and self._shared is None:
            self._shared = self._trace.shared()
        out = np.empty(self._total[request], dtype="<i4")
        end, j = self._total[request], request
        while True:
            start = self._keep[j]
            fixed = self._shared[j] if round_ and self._shared is not None else 0
            if fixed >= end:
                # Nested ranges: all before this is shared too, so the rest reads as in round 0.
                round_, fixed = 0, 0
            split = max(start, fixed)
            self._own(out, j, round_, split, end)
            self._own(out, j, 0, start, split)
            if start == 0:
                return out
            j, end = self._owner[j], start
            held = self._cache.get(Key(round_, j))
            if held is not None:
                out[:end] = held[:end]
                return out

    def _own(self, out: Ids, j: int, round_: int, start: int, end: int) -> None:
        """Write positions start..end, all owned by request j, with the ids of that round."""
        prompt_len = self._prompt_len[j]
        piece = (round_ << _ROUND_SHIFT) + 2 * j
        if start < prompt_len:
            middle = min(end, prompt_len)
            self._fresh(out[start:middle], piece, start)
            start = middle
        if start < end:
            self._fresh(out[start:end], piece + 1, start - prompt_len)

    def _fresh(self, out: Ids, piece: int, position: int) -> None:
        """The ids of one part from `position` on: the finaliser of SplitMix64 over a base and the position."""
        base = (piece * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 + position) & _U64
        for at in range(0, len(out), _CHUNK):
            count = min(_CHUNK, len(out) - at)
            x, y = self._x[:count], self._y[:count]
            np.add(_RAMP[:count], np.uint64((base + at) & _U64), out=x)
            np.right_shift(x, _S30, out=y)
            np.bitwise_xor(x, y, out=x)
            np.multiply(x, _C1, out=x)
            np.right_shift(x, _S27, out=y)
            np.bitwise_xor(x, y, out=x)
            np.multiply(x, _C2, out=x)
            np.right_shift(x, _S31, out=y)
            np.bitwise_xor(x, y, out=x)
            np.bitwise_and(x, _VOCAB_MASK, out=x)
            out[at : at + count] = x
