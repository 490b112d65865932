"""A recording made from what a daemon tells: the trace it comes to, against sequences that are known in full."""

from __future__ import annotations

import gzip
import json
import random
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.api.wire import messages
from kvslot.replay import Expander, RecordedLoad, Recording, TraceFile, load, load_of
from kvslot.replay.recording import Forest, Line, Own, Pace


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Asked(NamedTuple):
    """A request of a made-up load."""

    at: float
    took: float
    space: int
    prompt: list[int]
    output: list[int]
    unknown: int = 0  # tokens that followed and were never told


class Teller:
    """The daemon's side of a recording: events in the order of time, in pieces of any size."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.recording = Recording(values=True, memory_bytes=memory_bytes)
        self.recording.begin(0.0, 0.0)
        self.lines: list[Line] = []
        self.owns: list[Own] = []

    def tell(
        self, events: list[messages.Noted], *, at: float = 0.0, floor: float = 0.0, more: int = 0
    ) -> None:
        told = messages.Recorded(1, at, floor, False, 0, 0, 0, 0, 0, 0, events)
        self._keep(self.recording.feed(told))

    def end(self) -> None:
        self._keep(self.recording.end())

    def _keep(self, found: list[Line | Own]) -> None:
        for each in found:
            self.lines.append(each) if isinstance(each, Line) else self.owns.append(each)


def begun(
    number: int, at: float, prompt: list[int], space: int = 1, hit: int = 0, session: int = 7
) -> messages.Noted:
    return messages.Noted("begun", number, at, session, space, len(prompt), hit, packed(prompt))


def noted(
    what: str, number: int, at: float, count: int, tokens: list[int] | None = None, *, session: int = 7
) -> messages.Noted:
    return messages.Noted(what, number, at, session, 0, count, 0, packed(tokens or []))


def play(load_: list[Asked], teller: Teller, pieces: random.Random) -> None:
    """All of a load, told in the order in which things happen."""
    happened: list[tuple[float, int, messages.Noted]] = []
    for number, each in enumerate(load_, 1):
        happened.append((each.at, number, begun(number, each.at, each.prompt, each.space)))
        half = len(each.output) // 2
        position = len(each.prompt)
        for part in (each.output[:half], each.output[half:]):
            if part:
                happened.append((each.at + each.took / 2, number, noted("told", number, 0.0, position, part)))
                position += len(part)
        end = each.at + each.took
        happened.append((end, number, noted("ended", number, end, position + each.unknown)))
    happened.sort(key=lambda told: told[0])
    while happened:
        count = pieces.randrange(1, 6)
        now = happened[:count]
        del happened[:count]
        teller.tell([event for _, _, event in now], at=now[-1][0], floor=happened[0][0] if happened else 1e9)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@given(
    asked=st.lists(
        st.builds(
            Asked,
            at=st.floats(0, 10),
            took=st.floats(0.01, 10),
            space=st.integers(1, 2),
            prompt=TOKENS,
            output=st.lists(st.integers(0, 2), max_size=5),
            unknown=st.integers(0, 2),
        ),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 1000),
)
def test_every_pair_has_in_common_what_the_load_had(asked: list[Asked], seed: int) -> None:
    """However requests overlap and are told of: lengths, order, and each pair's common prefix are the load's."""
    teller = Teller()
    play(asked, teller, random.Random(seed))
    assert not teller.recording.held_back
    # Those that came in the same instant come in the order in which they were told of.
    order = sorted(range(len(asked)), key=lambda each: asked[each].at)
    expected = [asked[each] for each in order]
    assert [(line.prompt_len, line.output_len) for line in teller.lines] == [
        (len(each.prompt), len(each.output) + each.unknown) for each in expected
    ]
    assert [line.t for line in teller.lines] == [round(each.at, 6) for each in expected]
    made = rebuilt(teller)
    known = [each.prompt + each.output for each in expected]
    assert [sequence[: len(tokens)] for sequence, tokens in zip(made, known, strict=True)] == known
    for i, line in enumerate(teller.lines):
        best = 0
        for j in range(i):
            if expected[i].space == expected[j].space:
                best = max(best, common(known[i], known[j]))
        assert line.keep == best
        assert (line.parent >= 0) == (best > 0)
        assert line.parent < i
        if best:
            parent = expected[line.parent]
            assert parent.space == expected[i].space
            assert common(known[i], known[line.parent]) == best
    # Requests of one session follow each other.
    last: dict[int, int] = {}
    for i, line in enumerate(teller.lines):
        if line.session in last:
            before = expected[last[line.session]]
            assert before.at + before.took <= expected[i].at + 1e-9
            assert line.turn == teller.lines[last[line.session]].turn + 1
        last[line.session] = i


def rebuilt(teller: Teller) -> list[list[int]]:
    """Sequences as whoever asked for values puts them together."""
    made: list[list[int]] = []
    for own in teller.owns:
        line = teller.lines[own.request]
        assert own.position == line.keep
        made.append((made[line.parent][: line.keep] if line.keep else []) + list(own.tokens))
    return made


def test_lines_wait_for_those_that_came_before() -> None:
    """A request that runs, or may still be told of, holds the lines of later ones back; the end lets all go."""
    teller = Teller()
    teller.tell([begun(1, 1.0, [1, 2, 3]), begun(2, 2.0, [1, 2, 4]), noted("ended", 2, 3.0, 3)], floor=3.0)
    assert teller.lines == []
    # One that was told LATER at 0.5 is admitted only now.
    teller.tell([noted("ended", 1, 4.0, 3)], floor=0.5)
    assert teller.lines == []
    teller.tell([begun(3, 0.5, [1, 9])], floor=5.0)
    assert teller.lines == []
    teller.tell([begun(4, 6.0, [5])], floor=6.0)
    teller.end()
    assert [(line.t, line.parent, line.keep) for line in teller.lines] == [
        (0.5, -1, 0),
        (1.0, 0, 1),
        (2.0, 1, 2),
        (6.0, -1, 0),
    ]
    assert teller.recording.cut_off == 2


def test_one_that_hangs_holds_up_nothing_for_good() -> None:
    """Beyond a share of the memory the request that all wait for is cut off; times of lines never fall."""
    teller = Teller(memory_bytes=40_000)
    teller.tell([begun(1, 1.0, [1, 2, 3])], floor=0.0)
    for number in range(2, 100):
        at = float(number)
        prompt = [*range(100 * number, 100 * number + 100)]
        teller.tell([begun(number, at, prompt), noted("ended", number, at, 100)], at=at, floor=0.5)
    assert len(teller.lines) > 50
    assert teller.recording.held_back < 30
    teller.tell([noted("told", 1, 0.0, 3, [4]), noted("ended", 1, 100.0, 4)], floor=0.5)
    teller.tell([begun(200, 0.5, [1, 2, 9]), noted("ended", 200, 100.0, 3)], floor=200.0)
    teller.end()
    assert len(teller.lines) == 100
    assert teller.recording.cut_off == 1
    assert _short(teller.lines[0]) == (0, 3, 0)
    times = [line.t for line in teller.lines]
    assert times == sorted(times)


def test_roll_backs_gaps_and_sessions_that_end() -> None:
    """What is cut is not known any more; behind a gap nothing is; a session's end ends what it ran, and no more."""
    teller = Teller()
    teller.tell(
        [
            begun(1, 1.0, [1, 2]),
            noted("told", 1, 0.0, 2, [3, 4]),
            noted("cut", 1, 0.0, 3),
            noted("told", 1, 0.0, 3, [5]),
            noted("ended", 1, 2.0, 6),
            begun(2, 3.0, [1, 2, 3, 5, 6]),
            noted("told", 2, 0.0, 9, [7]),  # four tokens before it were lost
            noted("told", 2, 0.0, 10, [8]),
            noted("ended", 2, 4.0, 11),
            begun(3, 5.0, [1, 2, 3, 5, 6, 7], session=1),
            begun(4, 5.5, [1, 2, 3, 4], session=2),
            noted("left", 0, 6.0, 0, session=1),
        ],
        floor=9.0,
    )
    assert [tuple(each) for each in map(_short, teller.lines)] == [(0, 2, 4), (4, 5, 6), (5, 6, 0)]
    assert teller.recording.held_back == 1
    teller.tell([noted("ended", 4, 7.0, 4)], floor=9.0)
    assert _short(teller.lines[-1]) == (3, 4, 0)


def _short(line: Line) -> tuple[int, int, int]:
    return line.keep, line.prompt_len, line.output_len


def test_conversations_become_sessions() -> None:
    """Who goes on with an answer that has ended is of its session; who asks the same meanwhile, or branches, is not."""
    teller = Teller()
    answer = [7, 8, 9]
    teller.tell(
        [
            begun(1, 1.0, [1, 2]),
            noted("told", 1, 0.0, 2, answer),
            noted("ended", 1, 2.0, 5),
            begun(2, 3.0, [1, 2, *answer, 3]),  # goes on
            noted("ended", 2, 3.5, 6),
            begun(3, 4.0, [1, 2, *answer, 4]),  # goes on as well, from the same place
            noted("ended", 3, 4.5, 6),
            begun(4, 5.0, [1, 2, 5]),  # has the prompt alone in common
            noted("ended", 4, 5.5, 3),
        ],
        floor=9.0,
    )
    assert [(line.session, line.turn) for line in teller.lines] == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_of_several_parents_the_latest_that_had_ended_is_named() -> None:
    """Where requests had the same prompt and answer, the next one's parent is the latest whose answer was there."""
    teller = Teller()
    prompt, answer = [1, 2, 3], [7, 8, 9]
    for number, at in ((1, 1.0), (2, 2.0)):
        teller.tell(
            [begun(number, at, prompt), noted("told", number, 0.0, 3, answer), noted("ended", number, at, 6)]
        )
    teller.tell(
        [
            begun(3, 3.0, [1, 2, 3, 7, 5]),  # parts from both in the middle of the answer
            noted("ended", 3, 3.5, 5),
            begun(4, 4.0, prompt),  # answers the same, but has not ended when the next comes
            noted("told", 4, 0.0, 3, answer),
            begun(5, 5.0, [*prompt, *answer, 4]),
            noted("ended", 5, 6.0, 7),
            noted("ended", 4, 7.0, 6),
            begun(6, 8.0, [*prompt, *answer, 6]),
            noted("ended", 6, 9.0, 7),
        ],
        floor=9.0,
    )
    assert [(line.keep, line.parent) for line in teller.lines] == [
        (0, -1),
        (6, 0),
        (4, 1),
        (6, 1),
        (6, 0),
        (6, 4),
    ]


def test_what_is_cut_is_not_known_even_if_nothing_follows() -> None:
    """Rolled back, and longer at its end by tokens that were never told: what was there before counts no more."""
    teller = Teller()
    teller.tell(
        [
            begun(1, 1.0, [1, 2]),
            noted("told", 1, 0.0, 2, [3, 4]),
            noted("cut", 1, 0.0, 3),
            noted("ended", 1, 2.0, 6),
            begun(2, 3.0, [1, 2, 3, 4]),
            noted("ended", 2, 4.0, 4),
        ],
        floor=9.0,
    )
    assert [_short(line) for line in teller.lines] == [(0, 2, 4), (3, 4, 0)]


def test_forks_begin_with_what_they_share() -> None:
    """A fork is a request of its own, whose prompt is the part that it shares; one of an unknown parent is not."""
    teller = Teller()
    one, stray = fork(1, 2, 2.0, 3), fork(99, 3, 2.0, 3)
    teller.tell(
        [begun(1, 1.0, [1, 2, 3, 4]), one, stray, noted("told", 2, 0.0, 3, [9]), noted("ended", 2, 3.0, 4)]
    )
    teller.end()
    assert [_short(line) for line in teller.lines] == [(0, 4, 0), (3, 3, 1)]
    assert teller.recording.forks == 1


def fork(parent: int, child: int, at: float, shared: int) -> messages.Noted:
    return messages.Noted("forked", child, at, 7, parent, shared, 0, b"")


def test_beams_are_the_request_under_other_names() -> None:
    """Two beams, forked anew at each step: a line for the request and one for each branch that went its own way."""
    teller = Teller()
    teller.tell(
        [
            begun(1, 1.0, [1, 2, 3]),
            # The first step: both beams come from the prompt, whose own sequence is freed.
            fork(1, 2, 1.1, 3),
            fork(1, 3, 1.1, 3),
            noted("ended", 1, 1.1, 3),
            noted("told", 2, 0.0, 3, [10]),
            noted("told", 3, 0.0, 3, [20]),
            # The second: both come from the second beam.
            fork(3, 4, 1.2, 4),
            fork(3, 5, 1.2, 4),
            noted("ended", 2, 1.2, 4),
            noted("ended", 3, 1.2, 4),
            noted("told", 4, 0.0, 4, [30]),
            noted("told", 5, 0.0, 4, [40]),
            # The third goes on with one of them; the other child is freed as it is.
            fork(5, 6, 1.3, 5),
            fork(4, 7, 1.3, 5),
            noted("ended", 4, 1.3, 5),
            noted("ended", 5, 1.3, 5),
            noted("told", 6, 0.0, 5, [50]),
            noted("ended", 7, 1.4, 5),
            noted("ended", 6, 1.4, 6),
        ],
        floor=9.0,
    )
    made = rebuilt(teller)
    assert made == [[1, 2, 3, 10], [1, 2, 3, 20, 30], [1, 2, 3, 20, 40, 50]]
    assert [_short(line) for line in teller.lines] == [(0, 3, 1), (3, 3, 2), (4, 4, 2)]
    assert (teller.recording.forks, teller.recording.fork_tokens) == (2, 7)
    assert not teller.recording.held_back


def test_samples_of_one_prompt_are_requests_of_their_own() -> None:
    """Three answers to one prompt, forked before any of them: three lines, each with an answer."""
    teller = Teller()
    teller.tell([begun(1, 1.0, [1, 2, 3]), fork(1, 2, 1.1, 3), fork(1, 3, 1.1, 3)])
    for number, first in ((1, 10), (2, 20), (3, 30)):
        teller.tell([noted("told", number, 0.0, 3, [first, 5])])
    teller.tell([fork(1, 4, 1.5, 3), noted("ended", 4, 1.6, 3)])  # thought better of
    teller.tell([noted("ended", each, 2.0, 5) for each in (2, 1, 3)], floor=9.0)
    assert rebuilt(teller) == [[1, 2, 3, 10, 5], [1, 2, 3, 20, 5], [1, 2, 3, 30, 5]]


@pytest.mark.parametrize("memory_bytes", [400, 2000, 1 << 30])
def test_any_life_comes_to_a_sound_trace(memory_bytes: int) -> None:
    """Random prompts, forks, roll-backs, ends and deaths: each line fits its parent, and nothing is left over."""
    for seed in range(150):
        draw = random.Random(seed)
        teller = Teller(memory_bytes)
        live: dict[int, tuple[list[int], int]] = {}
        now = 0.0
        for number in range(1, 60):
            now += draw.random()
            teller.tell([_anything(draw, number, now, live)], at=now, floor=max(0.0, now - 2))
        teller.end()
        assert not teller.recording.held_back
        times = [line.t for line in teller.lines]
        assert times == sorted(times)
        for index, line in enumerate(teller.lines):
            assert line.parent < index
            assert (line.parent < 0) == (not line.keep)
            total = line.prompt_len + line.output_len
            assert line.keep <= total
            if line.keep:
                parent = teller.lines[line.parent]
                assert line.keep <= parent.prompt_len + parent.output_len
        for sequence, line in zip(rebuilt(teller), teller.lines, strict=True):
            assert len(sequence) <= line.prompt_len + line.output_len


def _anything(
    draw: random.Random, number: int, now: float, live: dict[int, tuple[list[int], int]]
) -> messages.Noted:
    """One thing that may happen next, to `live`: what each running sequence holds, and its session."""
    kind = draw.choice(["begun", "forked", "told", "told", "cut", "ended", "left"]) if live else "begun"
    if kind == "begun":
        live[number] = ([draw.randrange(3) for _ in range(draw.randrange(1, 9))], draw.randrange(3))
        tokens, session = live[number]
        return begun(number, now - 2 * draw.random(), tokens, session=session)
    if kind == "left":
        session = draw.randrange(3)
        for gone in [each for each, (_, whose) in live.items() if whose == session]:
            del live[gone]
        return noted("left", 0, now, 0, session=session)
    one = draw.choice(list(live))
    tokens, session = live[one]
    count = draw.randrange(1, len(tokens) + 1)
    if kind == "forked":
        live[number] = (tokens[:count], session)
        return messages.Noted("forked", number, now, session, one, count, 0, b"")
    if kind == "told":
        more = [draw.randrange(3) for _ in range(draw.randrange(1, 4))]
        tokens += more
        return noted("told", one, 0.0, len(tokens) - len(more), more, session=session)
    if kind == "cut":
        del tokens[count:]
        return noted("cut", one, 0.0, count, session=session)
    del live[one]
    return noted("ended", one, now, len(tokens) + draw.randrange(2), session=session)


def test_a_forest_forgets_what_was_used_longest_ago() -> None:
    """Beyond its memory the oldest leaves go and are counted; what was used lately is still found, and bytes add up."""
    draw = random.Random(3)
    forest = Forest(memory_bytes=60_000)
    hot = [draw.randrange(1 << 30) for _ in range(200)]
    seen: list[list[int]] = []
    for request in range(300):
        tokens = hot + [draw.randrange(1 << 30) for _ in range(50)]
        kept, first, last = forest.place(1, packed(tokens), request)
        assert kept == (200 if request else 0)
        assert (first, last) == ((0, request - 1) if request else (-1, -1))
        seen.append(tokens)
        assert forest.bytes == forest.recount() <= 60_000
    assert forest.forgotten_tokens > 0
    assert forest.place(1, packed(seen[-1]), 300)[0] == 250
    assert forest.place(1, packed(seen[0]), 301)[0] == 200  # its own part is gone
    assert forest.place(2, packed(hot), 302)[0] == 0


def test_pace_is_told_where_the_load_tells_it() -> None:
    """Times that are a sum of prompt and output give both prices back; too few, or all alike, give none."""
    draw = random.Random(5)
    pace = Pace()
    for _ in range(100):
        prompt, output = draw.randrange(10, 3000), draw.randrange(1, 300)
        pace.note(prompt, output, (prompt * 80e-6 + output * 0.012) * draw.uniform(0.98, 1.02))
    found = pace.found()
    assert found is not None
    assert found[0] == pytest.approx(80, rel=0.1)
    assert found[1] == pytest.approx(12, rel=0.1)
    alike = Pace()
    for _ in range(100):
        alike.note(100, 10, 1.0)
    assert alike.found() is None
    assert Pace().found() is None


def test_a_file_can_be_read_while_it_grows(tmp_path: Path) -> None:
    """After each flush the trace loads; closed, its header says what is known; what is there already is left alone."""
    path, values = tmp_path / "made.kvs.gz", tmp_path / "tokens.gz"
    with TraceFile(path, values) as file:
        file.add([Line(0.0, 0, 0, -1, 0, 10, 5), Own(0, 0, [1, 2])])
        file.flush()
        first = load(path)
        assert (len(first), first.header.recorded) == (1, RecordedLoad(complete=False))
        file.add([Line(1.5, 0, 1, 0, 15, 20, 5)])
        file.flush()
        assert len(load(path)) == 2
        teller = Teller()
        file.close(load_of(teller.recording, None, complete=True))
    trace = load(path)
    assert trace.header.recorded is not None
    assert trace.header.recorded.complete
    assert (trace.name, trace.t, trace.keep) == ("made", [0.0, 1.5], [0, 15])
    assert Expander(trace).sequence(1)[:15].tolist() == Expander(trace).sequence(0).tolist()
    assert [json.loads(each) for each in gzip.decompress(values.read_bytes()).splitlines()] == [
        {"format": "kvtokens-1", "trace": "made"},
        [0, 0, [1, 2]],
    ]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["made.kvs.gz", "tokens.gz"]
    with pytest.raises(FileExistsError):
        TraceFile(path)
    other = tmp_path / "other.kvs.gz"
    with pytest.raises(FileExistsError):
        TraceFile(other, values)
    assert not other.exists()
    assert len(load(path)) == 2
