"""Completion in real shells: what is offered behind a tab is what there is.

bash and zsh are typed to on a terminal of their own; fish answers `complete -C`.  A shell that is not here is skipped.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shutil
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvslot.cli import completion, ctl, doctor
from kvslot.cli import set as setting
from kvslot.daemon import main as daemon

PROMPT = "@@@ "


def script(shell: str, program: str = "kvslotctl") -> str:
    """What --print-completion prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        (ctl.main if program == "kvslotctl" else daemon.main)(["--print-completion", shell])
    assert end.value.code in (None, 0)
    return out.getvalue()


class Shell:
    """An interactive shell that has been given a completion script."""

    def __init__(self, command: list[str], setup: list[str], folder: Path) -> None:
        self.controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (50, 200))
        environ = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environ, start_new_session=True
        )
        os.close(terminal)
        for line in setup:
            self.type(f"{line}\n")
        self.type(f"PS1='{PROMPT[:2]}''{PROMPT[2:]}'\n")  # as it is typed it is not yet the prompt
        self.until(re.escape(PROMPT))

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """What it writes until this has come."""
        deadline = time.monotonic() + seconds
        seen = ""
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, f"no {pattern!r} in {seen!r}"
            if select.select([self.controller], [], [], 0.2)[0]:
                seen += os.read(self.controller, 1 << 16).decode(errors="replace")
        return seen

    def completes(self, start: str, whole: str) -> None:
        """`start` and a tab becomes `whole`, of which there is one; the line is thrown away after that."""
        self.type(f"{start}\t")
        self.until(re.escape(whole[len(start) :] if len(start) < len(whole) else whole))
        self.type("\x15\n")
        self.until(re.escape(PROMPT))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.controller)


Made = Callable[..., Shell]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Made]:
    """Makes shells, and takes them down."""
    made: list[Shell] = []

    def make(name: str, program: str = "kvslotctl") -> Shell:
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"no {name} here")
        folder = tmp_path / name
        folder.mkdir()
        text = script(name, program)
        if name == "bash":
            (folder / "script").write_text(text)
            made.append(Shell([path, "--norc", "--noprofile", "-i"], [f"source {folder}/script"], folder))
        else:
            (folder / f"_{program}").write_text(text)
            setup = [
                f"fpath=({folder} $fpath)",
                "autoload -Uz compinit",
                f"compinit -u -d {folder}/dump",
                "unsetopt zle_bracketed_paste",
            ]
            made.append(Shell([path, "-f", "-i"], setup, folder))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_tab_completes_commands_options_and_words(name: str, shell: Made) -> None:
    """Commands, options of a command, words that an argument takes, and settings that can be changed."""
    one = shell(name)
    one.completes("kvslotctl doct", "kvslotctl doctor")
    one.completes("kvslotctl doctor --ski", "kvslotctl doctor --skip")
    one.completes("kvslotctl doctor waterm", "kvslotctl doctor watermark")
    one.completes("kvslotctl set drain_sec", "kvslotctl set drain_seconds")
    one.completes("kvslotctl bench compac", "kvslotctl bench compaction")
    one.completes("kvslotctl docs operat", "kvslotctl docs operations")


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_the_daemon_completes_as_well(name: str, shell: Made) -> None:
    """Its options, and the levels of its log."""
    one = shell(name, "kvslotd")
    one.completes("kvslotd --check-c", "kvslotd --check-config")
    one.completes("kvslotd --log-level warn", "kvslotd --log-level warning")


def in_fish(source: Path, line: str) -> dict[str, str]:
    """What fish offers for a line: candidates and their descriptions."""
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("no fish here")
    done = subprocess.run(
        [fish, "--no-config", "-c", f"source {source}; complete -C '{line}'"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(source.parent)},
    )
    return {each.partition("\t")[0]: each.partition("\t")[2] for each in done.stdout.splitlines()}


def test_fish_offers_what_there_is_with_short_words(tmp_path: Path) -> None:
    """Each command with the words of the list of commands; options, words and files where those are meant."""
    source = tmp_path / "kvslotctl.fish"
    source.write_text(script("fish"))
    commands = in_fish(source, "kvslotctl ")
    assert set(ctl.COMMANDS) <= set(commands)
    assert commands["doctor"] == "look for what is wrong, and say what to do"
    assert max(len(words) for words in commands.values()) <= 60
    assert set(in_fish(source, "kvslotctl doctor ")) == set(doctor.NAMES)
    assert set(in_fish(source, "kvslotctl set ")) == set(setting.NAMES)
    assert "--skip" in in_fish(source, "kvslotctl doctor --s")
    (tmp_path / "some-file").touch()
    assert f"{tmp_path}/some-file" in in_fish(source, f"kvslotctl status --json {tmp_path}/some")
    source.write_text(script("fish", "kvslotd"))
    assert "--check-config" in in_fish(source, "kvslotd --che")


def test_every_shell_gets_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    """And one that there is none for is a matter of usage."""
    for each in completion.SHELLS:
        assert "doctor" in script(each)
    with pytest.raises(SystemExit) as end:
        ctl.main(["--print-completion", "fisch"])
    assert end.value.code == 2
    assert "did you mean fish?" in capsys.readouterr().err
