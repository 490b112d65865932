"""`kvslotctl replay` as a person and a script meet it: tables, JSON, exit codes, messages."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvslot import allocator
from kvslot.cli import ctl
from kvslot.cli.replay import COMPACTIONS, EVICTIONS
from kvslot.cli.summary import summary
from kvslot.replay import Quantiles, Row, Spread, policies

from ..report.synthetic import result
from .tiny import Line, write

LINES: list[Line] = [(None, i % 5, 0, i - 5 if i >= 5 else -1, 60 if i >= 5 else 0, 70, 9) for i in range(60)]


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    return str(write(tmp_path / "mine.kvs.gz", LINES, kind="made by hand"))


def rows(text: str) -> list[dict[str, Any]]:
    result = json.loads(text)
    assert list(result) == ["meta", "rows"]
    found = result["rows"]
    assert isinstance(found, list)
    return found


def test_the_table_has_a_column_a_policy_and_the_names_of_the_json(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One table per block size, the policies across, and every line named as its JSON key."""
    assert ctl.main(["replay", trace_file, "--policy", "paged", "token", "--block-size", "4", "16"]) == 0
    out = capsys.readouterr().out
    assert [int(size) for size in re.findall(r"blocks of (\d+)", out)] == [4, 16]
    assert re.search(r"paged.*token", out)
    for name in ("internal_fragmentation_pct", "hit_tokens_pct", "pseudo_oom_per_hour", "cpu_us_per_request"):
        assert name in out
        assert name in Row.__struct_fields__
    assert "60 requests" in out


def test_every_order_of_eviction_of_the_core_can_be_asked_for() -> None:
    """The parser's choices are the names of the core's policies, in their order."""
    assert EVICTIONS == allocator.EVICTIONS


def test_the_ways_of_compaction_are_those_of_the_replay() -> None:
    """The parser's choices, written out there, are the ones that a run knows."""
    assert get_args(policies.Compaction) == COMPACTIONS


def test_what_each_means_is_worth_stands_side_by_side(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--compaction gives slotted three columns: placement alone, with eviction, with moves; others keep one; the page
    has the pool before and after."""
    page = tmp_path / "moves.html"
    argv = [
        "replay",
        trace_file,
        "--policy",
        "token",
        "slotted",
        "--compaction",
        "forced",
        "--pool-tokens",
        "1000",
    ]
    assert ctl.main([*argv, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"placement.*\+ eviction.*\+ moves, forced", out)
    always = ("moved_tokens", "moves_abandoned", "blocks_given_back", "moved_per_given_back")
    for name in ("pinned_waste_pct", "blocks_free", "usable_run_pct", *always):
        assert f"│ {name} " in out
        assert name in Row.__struct_fields__
    assert "Compaction, before and after" in page.read_text(encoding="utf-8")
    assert ctl.main([*argv, "--json"]) == 0
    text = capsys.readouterr().out
    meta = json.loads(text)["meta"]
    # What the page says in a sentence and beside its pictures stands in the terminal and in the JSON, too.
    plain = " ".join(out.split())
    (said,) = meta["compaction"]
    assert said.startswith("mine: Free slots in blocks")
    assert said in plain
    (night,) = meta["quiet_nights"]
    before, after = night["blocks_free_before"], night["blocks_free_after"]
    assert f"wholly free blocks {before} -> {after} of {night['usable_blocks']}, " in plain
    assert f"{night['usable_run_pct_before']:.1f} -> {night['usable_run_pct_after']:.1f} %; " in plain
    assert (night["moved_per_given_back"] is None) == (after <= before)
    found = [row for row in rows(text) if row["phase"] == "all"]
    assert [(row["policy"], row["emptying"], row["compaction"]) for row in found] == [
        ("token", True, "off"),
        ("slotted", False, "off"),
        ("slotted", True, "off"),
        ("slotted", True, "forced"),
    ]


def test_policies_that_lack_an_order_of_eviction_keep_theirs(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for `gaps`, slotted evicts by it; the others stay with lru, say so, and their rows say so too."""
    argv = ["replay", trace_file, "--policy", "all", "--eviction", "gaps", "--pool-tokens", "1000", "--json"]
    assert ctl.main(argv) == 0
    captured = capsys.readouterr()
    assert "only lru" in captured.err
    used = {row["policy"]: row["eviction"] for row in rows(captured.out)}
    assert used.pop("slotted") == "gaps"
    assert set(used.values()) == {"lru"}


def test_json_on_stdout_is_nothing_but_json(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json alone stdout can be piped into a parser; keys are those of `Row`, one row per phase and run."""
    argv = ["replay", trace_file, "--policy", "token,hashed", "--pool-tokens", "1000", "--json"]
    assert ctl.main(argv) == 0
    first = capsys.readouterr()
    found = rows(first.out)
    assert {(row["policy"], row["phase"]) for row in found} >= {("token", "all"), ("hashed", "all")}
    for row in found:
        assert list(row) == list(Row.__struct_fields__)
        assert list(row["alloc_us"]) == list(Quantiles.__struct_fields__)
        assert list(row["reserved_pct"]) == list(Spread.__struct_fields__)
    meta = json.loads(first.out)["meta"]
    assert meta["seed"] == 0
    assert meta["version"]
    assert meta["machine"]["cpus"] >= 1
    assert meta["traces"][0]["name"] == "mine"
    assert re.fullmatch(r"[0-9a-f]{64}", meta["traces"][0]["digest"])


def test_same_seed_same_json(trace_file: str, tmp_path: Path) -> None:
    """Two commands with the same seed write the same rows, but for what was measured on the clock."""
    results = []
    for name in ("a.json", "b.json"):
        target = tmp_path / name
        argv = ["replay", trace_file, "--policy", "token", "--rate", "20", "--seed", "5", f"--json={target}"]
        assert ctl.main(argv) == 0
        results.append(rows(target.read_text()))
    for row in (*results[0], *results[1]):
        for key in ("alloc_us", "cpu_us_per_request", "grow_us_per_request"):
            del row[key]
    assert results[0] == results[1]


def test_both_kinds_of_pool_stand_side_by_side(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--sharing both gives each policy two columns, and rows that tell them apart."""
    argv = [
        "replay",
        trace_file,
        "--policy",
        "token",
        "--engines",
        "2",
        "--sharing",
        "both",
        "--pool-tokens",
        "4000",
    ]
    assert ctl.main([*argv, "--json"]) == 0
    assert {row["sharing"] for row in rows(capsys.readouterr().out)} == {"shared", "partitioned"}
    assert ctl.main(argv) == 0
    out = capsys.readouterr().out
    assert re.search(r"partitioned.*shared", out)
    assert "2 engines, sticky routing" in out


def test_the_search_for_live_fills_its_column(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--max-live-search finds max_concurrent_sessions; without it the key is there and null."""
    argv = ["replay", trace_file, "--policy", "token", "--pool-tokens", "600", "--json"]
    assert ctl.main(argv) == 0
    assert rows(capsys.readouterr().out)[0]["max_concurrent_sessions"] is None
    assert ctl.main([*argv, "--max-live-search", "32"]) == 0
    assert 1 <= rows(capsys.readouterr().out)[0]["max_concurrent_sessions"] <= 32


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "name a TRACE"),
        (["no-such-trace"], 3, "bundled trace"),
        (["mtbench101_a", "--policy", "best"], 2, "no policy is called best"),
        (["mtbench101_a", "--policy", ","], 2, "no policy is named"),
        (["mtbench101_a", "--policy", "hashed", "--pool-tokens", "1" + 20 * "0"], 2, "at most"),
        (["mtbench101_a", "--policy", "token", "--pool-tokens", "8"], 2, "two blocks of 16"),
        (["mtbench101_a", "--json=/proc/none/x.json"], 3, "/proc"),
        (["mtbench101_a", "--html", "/proc/none/x.html"], 3, "no folder /proc/none"),
        (["mtbench101_a", "--html", "/"], 3, "/: Is a directory"),
        (["--demo", "mtbench101_a"], 2, "--demo takes no TRACE"),
        (["mtbench101_a", "--policy", "token", "--compaction", "idle"], 2, "--compaction is slotted's alone"),
        (["mtbench101_a", "--step-gap-us", "5"], 2, "--compaction idle"),
        (["mtbench101_a", "--compaction", "forced", "--copy-tokens-s", "5"], 2, "--compaction idle"),
        (["--demo", "--policy", "token"], 2, "--demo takes no --policy"),
        (["--demo", "--pool-tokens", "9"], 2, "--demo takes no --pool-tokens"),
        (["--demo", "--night", "0.5"], 2, "--demo takes no --night"),
        (["sgd_a", "--night", "0.5"], 2, "give --via socket"),
        (["--list", "mtbench101_a"], 2, "--list takes no TRACE"),
        (["--policy", "slotted", "mtbench101_a"], 2, "kvslotctl replay mtbench101_a --policy slotted"),
        (["mtbench101_a", "--json", "sgd_a"], 2, "name traces first"),
        (["mtbench101_a", "--html", "sgd_a"], 2, "name traces first"),
        (["mtbench101_a", "--routing", "random"], 2, "give --engines"),
        (["mtbench101_a", "--clients", "2"], 2, "give --via socket"),
        (["mtbench101_a", "--page", "4", "--policy", "token"], 2, "give --policy slotted"),
        (["mtbench101_a", "--page", "3"], 2, "divide the block size"),
        (["mtbench101_a", "--rate", "1", "--ramp", "0"], 2, "leave one of them out"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line_and_a_code(
    argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors go to stderr in one line, without a traceback, and scripts can tell them by the exit code."""
    assert ctl.main(["replay", *argv]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["replay", "sgd_a", "--polcy", "token"], "no option --polcy; did you mean --policy?"),
        (["replay", "--block-size", "16", "sgd_a"], "sgd_a is not a whole number; name traces first"),
        (["replay", "sgd_a", "--seed", "x"], "x is not a whole number"),
        (["replay", "sgd_a", "--rate", "1", "--closed-loop"], "not allowed with"),
        (["replay", "sgd_a", "--eviction", "lur"], "did you mean lru?"),
        (["repaly"], "did you mean replay?"),
        (["status", "--scoket", "x"], "no option --scoket; did you mean --socket?"),
        (["status", "too much"], "one argument too many"),
        (["map", "--lines", "x"], "--lines"),
        (["bench", "cor"], "did you mean core?"),
        (["bench", "core", "--olny", "gc"], "did you mean --only?"),
    ],
)
def test_wrong_usage_is_told_in_two_lines_that_say_what_was_meant(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No screenful of usage, no name of a function of ours, and the command's own help to go to."""
    with pytest.raises(SystemExit) as caught:
        ctl.main(argv)
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert words in first
    assert not re.search(r"_\w+ value", first)
    assert second.startswith("See kvslotctl")
    assert second.endswith("--help")


def test_nothing_is_run_before_the_files_are_known_to_be_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page that cannot be written is told at once, and no folder is made for it."""
    from kvslot import replay

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(replay, "run_cases", never)
    assert ctl.main(["replay", "mtbench101_a", f"--html={tmp_path}/none/page.html"]) == 3
    assert ctl.main(["replay", "mtbench101_a", f"--json={tmp_path}/none/rows.json"]) == 3
    assert not (tmp_path / "none").exists()


def test_a_bare_name_is_a_bundled_trace_even_where_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slash or a suffix it is the file."""
    from kvslot.replay import bundled, find

    monkeypatch.chdir(tmp_path)
    (tmp_path / "sgd_a").write_text("not a trace")
    (tmp_path / "sgd_a.kvs.gz").write_text("not a trace")
    assert find("sgd_a") == bundled()["sgd_a"]
    assert find("./sgd_a") == Path("./sgd_a")
    assert find("sgd_a.kvs.gz") == Path("sgd_a.kvs.gz")


def test_what_is_named_twice_is_replayed_once(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a trace nor a block size gives the same column twice."""
    argv = ["replay", trace_file, trace_file, "--policy", "token", "--block-size", "16", "16", "--json"]
    assert ctl.main(argv) == 0
    assert [row["phase"] for row in rows(capsys.readouterr().out)].count("all") == 1


def test_pages_cost_copies(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--page N: where requests part inside a page it is put together anew; the hits are those of single slots."""
    argv = ["replay", trace_file, "--policy", "slotted", "--pool-tokens", "2000", "--json", "--page"]
    found = []
    for page in ("1", "8"):
        assert ctl.main([*argv, page]) == 0
        found.append(rows(capsys.readouterr().out)[0])
    assert found[0]["copied_tokens"] == 0
    assert found[1]["copied_tokens"] > 0
    assert found[0]["hit_tokens"] == found[1]["hit_tokens"]


def test_one_request_is_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a run of seconds did not take 0.00 h."""
    path = write(tmp_path / "one.kvs.gz", LINES[:1])
    assert ctl.main(["replay", str(path), "--policy", "token"]) == 0
    out = capsys.readouterr().out
    assert "1 request," in out
    assert re.search(r"[1-9.] s simulated", out)


def test_the_summary_tells_prices_too() -> None:
    """More CPU time and more pieces than the cheapest are told beside the gains; what costs no more is not."""

    def made(cpu: float, pieces: float) -> list[str]:
        found = result(block_sizes=(16,), phases=("all",))
        found.rows[:] = [
            msgspec.structs.replace(row, cpu_us_per_request=cpu, extents_per_1k_tokens=pieces)
            if row.policy == "slotted"
            else msgspec.structs.replace(row, cpu_us_per_request=50.0, extents_per_1k_tokens=10.0)
            for row in found.rows
        ]
        return [line for line in summary(found) if "PRICE" in line]

    cpu, pieces = made(119.0, 24.9)
    assert "119 us" in cpu
    assert "50 us" in cpu
    assert "24.9 pieces" in pieces
    assert made(50.0, 10.0) == []


@pytest.mark.parametrize(
    "argv", [["--block-size", "0"], ["--live", "x"], ["--watermark", "1.5"], ["--hours", "-1"]]
)
def test_values_out_of_range_are_refused_by_the_parser(argv: list[str]) -> None:
    """argparse's own exit code, 2."""
    with pytest.raises(SystemExit) as caught:
        ctl.main(["replay", "mtbench101_a", *argv])
    assert caught.value.code == 2


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """--help of the program and of the command show how to call them and what they return."""
    for argv in (["--help"], ["replay", "--help"]):
        with pytest.raises(SystemExit) as caught:
            ctl.main(argv)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert "exit codes:" in out
        assert "kvslotctl replay --demo" in out


def test_completion_knows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The completion script is made from the parser itself."""
    with pytest.raises(SystemExit) as caught:
        ctl.main(["--print-completion", "bash"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert "--max-live-search" in told
    assert "mix200_a" in told, "the bundled traces"
    assert "hashed" in told, "the policies"
    from kvslot.cli import replay
    from kvslot.replay.policies import NAMES

    assert (*NAMES, "all") == replay.POLICIES


def test_the_list_names_every_bundled_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """--list shows what can be named."""
    assert ctl.main(["replay", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("mix200_a", "sgd_a", "kvtester_a"):
        assert name in out


def test_names_in_a_trace_are_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a trace file calls itself is printed as it stands, brackets and all."""
    path = write(tmp_path / "odd.kvs.gz", LINES, name="[/bad] [bold]", kind="[/]")
    assert ctl.main(["replay", str(path), "--policy", "token"]) == 0
    assert "[/bad] [bold]" in capsys.readouterr().out


def test_standard_output_may_be_closed(trace_file: str) -> None:
    """`kvslotctl ... >&-` runs to its end."""
    command = f'"{sys.executable}" -Im kvslot.cli.ctl replay "{trace_file}" --policy token >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_leaves_early_is_no_error(trace_file: str) -> None:
    """`kvslotctl ... | head` ends quietly."""
    command = [sys.executable, "-Im", "kvslot.cli.ctl", "replay", trace_file, "--policy", "token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0
    assert err == b""


def test_the_demo_prints_tables_and_sentences_and_leaves_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--demo ends with gains and nothings in words, and writes rows and page under build/replay."""
    from kvslot.cli import replay as command
    from kvslot.replay import Case, ReplayConfig, find, load

    def few(seed: int, policies: list[str]) -> list[Case]:
        made = load(find("mtbench101_a")).head(300)
        return [
            Case(made, ReplayConfig(policy=policy, block_size=size, pool_tokens=20_000, seed=seed))
            for size in (16, 64)
            for policy in policies
        ]

    monkeypatch.setattr(command, "_demo_cases", few)
    monkeypatch.chdir(tmp_path)
    assert ctl.main(["replay", "--demo"]) == 0
    out = capsys.readouterr().out
    assert "In short" in out
    assert "mtbench101_a, blocks of 64" in out
    found = rows((tmp_path / "build/replay/demo.json").read_text())
    assert {row["policy"] for row in found} == {"contiguous", "paged", "hashed", "token", "slotted"}
    assert (tmp_path / "build/replay/demo.html").stat().st_size > 1000
    # What has no blocks ran once, and stands under every block size.
    token = [row for row in found if row["policy"] == "token" and row["phase"] == "all"]
    assert [row.pop("block_size") for row in token] == [16, 64]
    assert [row.pop("run") for row in token] == [3, 8]
    assert token[0] == token[1]
