"""docs/results.md says what the kept rows say, and nothing else; the runner goes on from what it has kept."""

import re
from pathlib import Path

import msgspec
import pytest

from kvslot import __version__
from kvslot.benchmarks import results
from kvslot.benchmarks.results import FOLDER, PAGE, Command, Entry, listed, load, save
from kvslot.benchmarks.results_page import SECTIONS, render
from kvslot.replay import bundled

FILE_BYTES_MAX = 300_000


def entry(command: str, *rows: bytes, **changes: object) -> Entry:
    made = Entry(
        command=command,
        version="1",
        code="abc",
        started="2026-01-01T00:00:00+00:00",
        wall_s=1.5,
        machine={"cpu": "x", "cores": 1, "memory_gib": 1.0},
        rows=[msgspec.Raw(row) for row in rows],
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.skipif(not PAGE.exists(), reason="a built package has no docs")
def test_the_document_is_what_the_kept_rows_say() -> None:
    """Rendering what is kept gives the document in the repository, to the letter."""
    assert PAGE.read_text(encoding="utf-8") == render(load()), "make results ARGS=--render"


def test_nothing_measured_says_so() -> None:
    """Without a single row the document stands, with all sections, and claims nothing."""
    text = render({})
    assert "Nothing has been measured yet." in text
    for index, (_, title, _) in enumerate(SECTIONS, 1):
        assert f"## {index}. {title}" in text
    assert "held" not in text.partition("## The commands")[0]


def test_every_command_has_its_section_and_stands_once() -> None:
    """A command that two sections ask for is listed once; no section of the list goes unrendered."""
    commands = listed()
    texts = [command.text for command in commands]
    assert len(set(texts)) == len(texts)
    assert {command.section for command in commands} == {section for section, _, _ in SECTIONS}
    assert [command.slow for command in commands] == sorted(command.slow for command in commands)


def test_every_bundled_trace_is_replayed() -> None:
    """A trace that is added to the repository must be added to the list."""
    named = {command.words[1] for command in listed() if command.section == "traces"}
    assert named == set(bundled())


def test_commands_are_ones_that_the_command_line_takes() -> None:
    """Each command of the list parses."""
    from kvslot.cli.ctl import parser

    for command in listed():
        parser().parse_args(list(command.words))


def test_kept_files_are_small_and_known() -> None:
    """Each kept entry is of a command in the list, in its section's file; no file is large."""
    known = {command.text: command.section for command in listed()}
    for path in FOLDER.glob("*.json"):
        assert path.stat().st_size < FILE_BYTES_MAX, path.name
        file = msgspec.json.decode(path.read_bytes(), type=results.File)
        assert file.section == path.stem
        assert [each.command for each in file.entries if known.get(each.command) != path.stem] == []


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """A file that is written holds a row a line, and reads back as it was."""
    entries = [entry("a", b'{"x":1}', b'{"x":2}'), entry("b", failed="stopped"), entry("c", b'{"y":[1]}')]
    save("traces", entries, tmp_path)
    assert {"traces.json"} == {path.name for path in tmp_path.iterdir()}
    found = load(tmp_path)
    assert [found[each.command] for each in entries] == entries
    assert re.findall(r"^\{\"[xy]\".*$", (tmp_path / "traces.json").read_text(), re.MULTILINE)


def test_a_command_that_fails_is_an_entry_with_a_reason(tmp_path: Path) -> None:
    """A trace that is not there gives no rows, and says why."""
    found = results.measure(Command("traces", ("replay", str(tmp_path / "none.kvs.gz"))))
    assert found.rows == []
    assert "none.kvs.gz" in found.failed
    # All sections but one are short of more commands than are listed one by one.
    command = next(each for each in listed() if each.section == "core")
    assert f"No result, {found.failed}" in render({command.text: found})


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for this version is passed over, failures are tried again, `changed` looks at the code's digest."""
    wanted = listed()[:3]
    calls: list[str] = []

    def measure(command: Command, patience_s: float) -> Entry:
        calls.append(command.text)
        return entry(command.text, version=__version__, code="new")

    monkeypatch.setattr(results, "measure", measure)
    monkeypatch.setattr(results, "digest", lambda: "new")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "load", lambda: load(tmp_path))
    monkeypatch.setattr(results, "save", lambda section, entries: save(section, entries, tmp_path))
    kept = [
        entry(wanted[0].text, version=__version__, code="old"),
        entry(wanted[1].text, version=__version__, code="old", failed="stopped"),
    ]
    save(wanted[0].section, kept, tmp_path)
    assert results.run(wanted, changed=False, most_s=1e9, patience_s=1.0) == 0
    assert calls == [wanted[1].text, wanted[2].text]
    calls.clear()
    assert results.run(wanted, changed=True, most_s=1e9, patience_s=1.0) == 0
    assert calls == [wanted[0].text]


def test_sections_of_different_code_say_so() -> None:
    """One digest everywhere needs no word in the sections; two are told at the top and in each section."""
    first, second = [command.text for command in listed() if command.section in ("traces", "long")][:2]
    same = render({first: entry(first), second: entry(second)})
    assert "measured with the same code" not in same
    assert "*Measured with code" not in same
    mixed = render({first: entry(first), second: entry(second, code="def")})
    assert "**Not all of it was measured with the same code**" in mixed
    assert "*Measured with code" in mixed


def test_what_is_stale_is_listed_by_section() -> None:
    """Other code, another version, a failure or nothing at all: each is named, with its reason; the rest is not."""
    names = {section: [c.text for c in listed() if c.section == section] for section, _, _ in SECTIONS}
    kept = {text: entry(text, version=__version__) for texts in names.values() for text in texts}
    assert not any(results.stale(kept, "abc").values())
    old, gone, failed, *_ = names["traces"]
    kept[old].code = "def"
    kept[failed].failed = "stopped"
    del kept[gone]
    found = results.stale(kept, "abc")
    assert found["traces"] == [f"{old} (code def)", f"{gone} (not measured)", f"{failed} (failed: stopped)"]
    assert found["sizes"] == []
