"""Traces: what a file may hold, what is said when it does not, and that ids come out as the format defines them."""

import contextlib
import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.replay import Expander, bundled, find, load
from kvslot.replay.traces import (
    TOKENS_MAX,
    TraceError,
    TraceHeaderError,
    TraceNotFound,
    TraceRequestError,
    TraceUnreadable,
)

from .tiny import Line, write

M = (1 << 64) - 1


def fresh(piece: int, position: int) -> int:
    """One id, as the format's definition has it."""
    x = (piece * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 + position) & M
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M
    return (x ^ (x >> 31)) % (1 << 31)


def plain(lines: list[Line], request: int) -> list[int]:
    """The ids of prompt and output of one request, by the definition: seq(parent)[:keep] + fresh."""
    chain = []
    j, need = request, lines[request][5] + lines[request][6]
    while j >= 0:
        chain.append((j, need))
        keep = lines[j][4]
        need = min(need, keep)
        j = lines[j][3] if keep else -1
    ids: list[int] = []
    for j, need in reversed(chain):
        _, _, _, _, keep, prompt_len, _ = lines[j]
        ids = ids[:keep]
        ids += [fresh(2 * j, at) for at in range(len(ids), min(prompt_len, need))]
        ids += [fresh(2 * j + 1, at - prompt_len) for at in range(len(ids), need)]
    return ids


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@st.composite
def requests(draw: st.DrawFn) -> list[Line]:
    """Any trace the format allows, small."""
    lines: list[Line] = []
    for i in range(draw(st.integers(1, 12))):
        prompt_len, output_len = draw(st.integers(1, 30)), draw(st.integers(0, 20))
        parent = draw(st.integers(-1, i - 1))
        most = 0 if parent < 0 else min(lines[parent][5] + lines[parent][6], prompt_len + output_len)
        lines.append(
            (None, draw(st.integers(0, 4)), 0, parent, draw(st.integers(0, most)), prompt_len, output_len)
        )
    return lines


@given(lines=requests(), cache=st.sampled_from([0, 100, 1 << 20]), order=st.randoms(use_true_random=False))
def test_ids_are_those_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line], cache: int, order: random.Random
) -> None:
    """Whatever the trace, the order of asking and the cache, ids equal an independent rendering of the definition."""
    trace = load(write(tmp_path_factory.mktemp("trace") / "any.kvs.gz", lines))
    expander = Expander(trace, cache_bytes=cache)
    for i in order.sample(range(len(lines)), len(lines)):
        want = plain(lines, i)
        assert expander.prompt(i) == np.array(want[: lines[i][5]], dtype="<i4").tobytes()
        assert expander.output(i) == np.array(want[lines[i][5] :], dtype="<i4").tobytes()


@pytest.mark.parametrize("name", sorted(bundled()))
def test_bundled_traces_expand_as_defined(name: str) -> None:
    """Every bundled trace passes all checks, and some of its requests, deep ones too, expand as defined."""
    path = find(name)
    trace = load(path)
    with gzip.open(path, "rt", encoding="utf-8") as text:
        next(text)
        lines = [json.loads(line) for line in text]
    small = [i for i in range(len(trace)) if trace.total[i] < 3000]
    expander = Expander(trace)
    for i in random.Random(1).sample(small, min(8, len(small))):
        assert expander.sequence(i).tolist() == plain(lines, i)


@given(lines=requests())
def test_rounds_repeat_the_tree_and_meet_in_what_sessions_share(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line]
) -> None:
    """Within a round all common prefixes are as long as in round 0; two rounds have those positions in common that
    requests of different sessions share in the trace, and no others."""
    trace = load(write(tmp_path_factory.mktemp("trace") / "any.kvs.gz", lines))
    expander = Expander(trace)
    rounds = [[expander.sequence(i, r).tolist() for i in range(len(lines))] for r in range(3)]
    n = range(len(lines))
    for i, j in itertools.product(n, n):
        assert common(rounds[1][i], rounds[1][j]) == common(rounds[0][i], rounds[0][j])
    for i in n:
        shared = _shared_with_other_sessions(lines, i)
        assert common(rounds[1][i], rounds[0][i]) == shared
        assert common(rounds[2][i], rounds[1][i]) == shared


def _shared_with_other_sessions(lines: list[Line], request: int) -> int:
    """Positions of a sequence, from the start on, that a request of a session other than their owner's covers."""

    def owner_of(i: int, position: int) -> int:
        while position < lines[i][4]:
            i = lines[i][3]
        return i

    total = lines[request][5] + lines[request][6]
    for position in range(total):
        owner = owner_of(request, position)
        if not any(
            lines[other][1] != lines[owner][1]
            and position < lines[other][5] + lines[other][6]
            and owner_of(other, position) == owner
            for other in range(len(lines))
        ):
            return position
    return total


def test_long_chains_need_no_recursion_and_little_memory(tmp_path: Path) -> None:
    """A chain of 5,000 turns is put together by a loop, and the cache stays within its bound."""
    lines: list[Line] = [(None, 0, 0, -1, 0, 4, 1)]
    lines += [(None, 0, i, i - 1, 4 + i, 5 + i, 0) for i in range(1, 5000)]
    trace = load(write(tmp_path / "chain.kvs.gz", lines))
    expander = Expander(trace, cache_bytes=100_000)
    assert len(expander.sequence(4999)) == 5004
    for i in range(0, 5000, 37):
        expander.sequence(i)
        assert expander.cache_bytes <= 100_000


GOOD: Line = (None, 0, 0, -1, 0, 10, 5)


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ([GOOD, (None, 1, 0, 0, 3, -1, 5)], 3, "prompt_len is -1"),
        ([GOOD, (None, 1, 0, 0, 3, 0, 5)], 3, "prompt_len is 0"),
        ([(None, 0, 0, -1, 0, 10, -5)], 2, "output_len is -5"),
        ([GOOD, (None, 1, 0, 0, -1, 10, 5)], 3, "keep is -1"),
        ([GOOD, (None, 1, 0, 0, 16, 20, 5)], 3, "keep is 16, parent 0 has 15"),
        ([GOOD, (None, 1, 0, 0, 9, 4, 2)], 3, "keep is 9, the sequence has 6"),
        ([GOOD, (None, 1, 0, 1, 3, 10, 5)], 3, "parent is 1, this is request 1"),
        ([GOOD, (None, 1, 0, 7, 3, 10, 5)], 3, "parent is 7"),
        ([GOOD, (None, 1, 0, -2, 0, 10, 5)], 3, "parent is -2"),
        ([GOOD, (None, 1, 0, -1, 3, 10, 5)], 3, "keep is 3 without a parent"),
        ([GOOD, (1.0, 1, 0, -1, 0, 10, 5)], 3, "some requests have a time"),
        ([(2.0, 0, 0, -1, 0, 10, 5), (1.0, 1, 0, -1, 0, 10, 5)], 3, "before its predecessor"),
        ([(-1.0, 0, 0, -1, 0, 10, 5)], 2, "time is -1.0"),
        ([(None, 0, 0, -1, 0, TOKENS_MAX, 1)], 2, "tokens"),
        ([], None, "holds no request"),
    ],
)
def test_a_contradiction_is_named_with_its_line(
    tmp_path: Path, lines: list[Line], line: int | None, words: str
) -> None:
    """A request that cannot be true is refused with file, line, what is wrong, and what would be right."""
    path = write(tmp_path / "bad.kvs.gz", lines)
    with pytest.raises(TraceRequestError) as caught:
        load(path)
    error = caught.value
    assert (error.path, error.line) == (str(path), line)
    assert words in error.problem
    assert error.remedy
    assert str(path) in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "[null,0,0,-1,0,10]",
        "[null,0,0,-1,0,10,5,7]",
        '{"t": 0}',
        "[null,0,0,-1,0,10.5,5]",
        '[null,0,0,-1,0,"ten",5]',
        "[null,0,0,-1,0,10,5",
        "[null,0,0,-1,0,99999999999999999999999,5]",
        "[NaN,0,0,-1,0,10,5]",
        "\x00\xff",
        "[" * 60_000,
        "1" * 70_000,
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str) -> None:
    """A line that is no request, whatever it is, is refused by its number."""
    path = tmp_path / "bad.kvs.gz"
    with gzip.open(path, "wb") as out:
        out.write(b'{"format":"kvstruct-1"}\n[null,0,0,-1,0,10,5]\n' + text.encode("latin-1") + b"\n")
    with pytest.raises(TraceRequestError) as caught:
        load(path)
    assert caught.value.line == 3


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\n",
        b"[]\n",
        b"hello\n",
        b'{"format":"kvstruct-2"}\n',
        b'{"name":"x"}\n',
        b"\xff\xfe\n",
        b"[" * 9000,
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, head: bytes) -> None:
    """A file that is gzip but no kvstruct-1 trace is refused at line 1."""
    path = tmp_path / "bad.kvs.gz"
    with gzip.open(path, "wb") as out:
        out.write(head)
    with pytest.raises(TraceHeaderError) as caught:
        load(path)
    assert caught.value.line == 1


@given(cut=st.integers(0, 120))
def test_a_file_cut_short_is_unreadable(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """However much of a trace's end is missing, the answer is a typed error and never half a trace."""
    folder = tmp_path_factory.mktemp("cut")
    whole = write(folder / "whole.kvs.gz", [GOOD] * 20).read_bytes()
    path = folder / "cut.kvs.gz"
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises((TraceUnreadable, TraceHeaderError)):
        load(path)


@given(at=st.integers(10, 100), value=st.integers(0, 255))
def test_a_damaged_file_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    """A flipped byte is either harmless to gzip's own checks or a TraceError."""
    folder = tmp_path_factory.mktemp("damaged")
    data = bytearray(write(folder / "whole.kvs.gz", [GOOD] * 20).read_bytes())
    data[at % len(data)] = value
    path = folder / "damaged.kvs.gz"
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        load(path)


def test_what_is_no_file_says_what_there_is(tmp_path: Path) -> None:
    """A wrong name lists the bundled traces; a folder, plain text and a missing permission are told apart."""
    with pytest.raises(TraceNotFound, match="mix200_a"):
        find("no-such-trace")
    with pytest.raises(TraceUnreadable, match="folder"):
        find(str(tmp_path))
    text = tmp_path / "text.kvs.gz"
    text.write_text("not gzip")
    with pytest.raises(TraceUnreadable, match="gzip"):
        load(text)
    with pytest.raises(TraceUnreadable, match="cannot be read"):
        load(tmp_path / "absent.kvs.gz")


def test_the_head_of_a_trace_is_a_trace(tmp_path: Path) -> None:
    """The first requests of a trace expand to the same ids as in the whole."""
    trace = load(find("mtbench101_a"))
    head = trace.head(100)
    assert len(head) == 100
    assert Expander(head).sequence(99).tolist() == Expander(trace).sequence(99).tolist()
    assert trace.head(10**9) is trace
