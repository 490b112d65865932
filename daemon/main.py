"""`kvslotd`: reads the settings, says what is wrong with them or what they come to, and serves.

    0   ended as told to          2  settings that cannot be used, or memory that is not there
    70  a fault of the daemon     3  the socket cannot be had: another daemon serves it, or its folder refuses
   130  interrupted before it was ready

A supervisor that starts the daemon again should not do so after 2 or 3.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvslot import __version__

if TYPE_CHECKING:
    from kvslot.daemon.config import Effective, PoolSum, Settings

OK: Final = 0
CONFIG: Final = 2
INTERRUPTED: Final = 130

EXAMPLE: Final = """\
socket = "/run/kvslot/kvslot.sock"

[[pool]]
name = "default"
size = "8GiB"
model_config = "/models/Llama-3.1-8B/config.json"
"""

DEMO: Final[Mapping[str, object]] = {
    "pool_name": "demo",
    "pool_size": "64MiB",
    "pool_layout": {
        "layers": 30,
        "kv_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
        "model": "a small model's shape (SmolLM2-135M)",
    },
}
"""Enough for some thousand tokens; made at once on any machine."""

EPILOG: Final = """\
examples:
  kvslotd --config kvslot.toml                        serve
  kvslotd --config kvslot.toml --check-config         what the settings come to; exit code 0, or 2 with every problem
  kvslotd --demo --socket ./kvslot.sock               a pool of 64 MiB to try things on
  kvslotd --pool-size 8GiB --model-config ./config.json

Settings are read from the file, then from the environment (KVSLOT_SOCKET, KVSLOT_LOG_LEVEL, KVSLOT_POOL_SIZE, ...),
then from flags; the last one holds.  SIGTERM and SIGINT drain: no new work, then the end; the second one ends at once.

exit codes:
   0  ended as told to             2  settings that cannot be used, or memory that is not there
  70  a fault of the daemon        3  the socket cannot be had
 130  interrupted before it was ready
"""


class Parser(argparse.ArgumentParser):
    """Tells wrong usage in two lines: what is wrong, with what was meant, and where the help is."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        mark = "unrecognized arguments: "
        if message.startswith(mark):
            words = message.removeprefix(mark).split(" ")
            wrong = next((word for word in words if word.startswith("-")), words[0])
            name, equals, value = wrong.partition("=")
            options = [option for action in self._actions for option in action.option_strings]
            if name.startswith("-"):
                near = difflib.get_close_matches(name, options, 1, 0.6)
                hint = _setting(name) or (f"; did you mean {near[0]}{equals}{value}?" if near else "")
                message = f"there is no option {name}{hint}"
            else:
                message = f"{wrong!r} is one argument too many"
        self.exit(CONFIG, f"{self.prog}: {message}\nSee {self.prog} --help\n")


def _setting(option: str) -> str:
    """Where a setting that has no flag is set, if that is what was meant; only the common ones have flags."""
    from kvslot.daemon import config

    name = option.removeprefix("--").replace("-", "_")
    known = {each: config.PREFIX + each.upper() for each in config.SETTINGS}
    known |= {f"pool_{each}": config.POOL_PREFIX + each.upper() for each in config.POOL}
    known |= {each: config.POOL_PREFIX + each.upper() for each in config.POOL if each not in config.SETTINGS}
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.85)
        flags = [config.flag_of(each) for each in _SETTING_FLAGS]
        if not near or difflib.get_close_matches(option, flags, 1, 0.85):
            return ""
        name = near[0]
    return f"; {name.removeprefix('pool_')} is a setting: write it in the file, or set {known[name]} in the environment"


class Suggested(tuple[str, ...]):
    """Choices for the shell to complete; what is no such word is for the settings to refuse, with all else."""

    __slots__ = ()

    def __contains__(self, word: object) -> bool:
        return True


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(
        prog="kvslotd",
        description="The kvslot daemon: owns a KV-cache pool and serves it to the LLM engines of this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"kvslotd {__version__}")
    import shtab

    shtab.add_argument_to(top, ["--print-completion"])
    config = top.add_argument("--config", metavar="FILE", help="settings, as TOML; default: $KVSLOT_CONFIG")
    config.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it on the action
    top.add_argument("--socket", metavar="PATH", help="the Unix socket to listen on")
    top.add_argument("--admin-socket", metavar="PATH", help="the Unix socket of the admin API (HTTP)")
    top.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=Suggested(("debug", "info", "warning", "error")),
        help="debug, info, warning or error",
    )
    top.add_argument(
        "--log-format",
        metavar="FORMAT",
        choices=Suggested(("auto", "json", "console")),
        help="json, console, or auto (console on a terminal)",
    )
    top.add_argument(
        "--no-prefault",
        action="store_true",
        help="take memory when it is first touched, not all of it at start",
    )
    pool = top.add_argument_group("the pool", "where the file has several pools, they can only be set there")
    pool.add_argument("--pool-size", metavar="SIZE", help='its memory: "512MiB", "8GiB"')
    pool.add_argument("--pool-blocks", metavar="N", help="its memory in blocks, instead of a size")
    pool.add_argument("--block-size", metavar="SLOTS", dest="pool_block_size", help="slots of a block")
    pool.add_argument(
        "--model-config", metavar="FILE", dest="pool_model_config", help="a model's Hugging Face config.json"
    )
    pool.add_argument(
        "--dtype", dest="pool_dtype", metavar="DTYPE", help="of K and V: bfloat16, float16, fp8, ..."
    )
    pool.add_argument("--demo", action="store_true", help="a pool of 64 MiB in the shape of a small model")
    check = top.add_argument_group("checking")
    check.add_argument(
        "--check-config",
        action="store_true",
        help="print the effective settings and what each pool comes to, then end",
    )
    check.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="with --check-config: write the result as JSON, to FILE or (instead of the text) to stdout",
    )
    return top


_SETTING_FLAGS: Final = (
    "socket", "admin_socket", "log_level", "log_format",
    "pool_size", "pool_blocks", "pool_block_size", "pool_model_config", "pool_dtype",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Serves until told to end; returns the exit code.  argparse exits by itself on --help and wrong usage."""
    _fill_standard_descriptors()
    try:
        code = _main(parser().parse_args(argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of --check-config has gone (`| head`).  Keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _fill_standard_descriptors() -> None:
    """Opens /dev/null for what was closed at our start of 0, 1 and 2.

    Or the pool's memory might get number 2, and what a library writes to standard error would land in it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 -- for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _main(arguments: argparse.Namespace) -> int:
    from kvslot.daemon import config

    overrides: dict[str, object] = {name: getattr(arguments, name) for name in _SETTING_FLAGS}
    flags = {"prefault": "--no-prefault"}  # what a setting was said by, where its name does not tell
    path = arguments.config or os.environ.get("KVSLOT_CONFIG") or None
    if arguments.no_prefault:
        overrides["prefault"] = False
    if arguments.json is not None and not arguments.check_config:
        print("kvslotd: --json goes with --check-config", file=sys.stderr)
        return CONFIG
    if arguments.demo:
        if path is not None:
            print(
                f"kvslotd: --demo is a pool by itself, and {path} has its own: give one of them",
                file=sys.stderr,
            )
            return CONFIG
        said = {key: value for key, value in overrides.items() if value is not None}
        flags |= {key: "--demo" for key in DEMO if key not in said}
        overrides = {**DEMO, **said}
    try:
        effective = config.read(path, os.environ, overrides, flags)
        if not effective.settings.pools:
            raise config.ConfigError(["no pool is configured"])
        sums = [config.pool_sum(pool) for pool in effective.settings.pools]
    except config.ConfigError as error:
        return _refuse(error, arguments)
    if arguments.check_config:
        return _check(effective, sums, arguments.json)
    return _serve(effective.settings, lambda: config.load(path, os.environ, overrides, flags))


def _serve(settings: Settings, reload: Callable[[], Settings]) -> int:
    import faulthandler

    import structlog

    from kvslot.daemon import config, logs
    from kvslot.daemon.server import serve

    # A watchdog ends a loop that hangs by SIGABRT: where it hung is then in the log.  To the descriptor itself, since
    # nothing else can be relied upon by then.
    faulthandler.enable(2)
    logs.set_up(settings.log_format, settings.log_level)
    log = structlog.get_logger()
    for stray in config.strays(os.environ):
        log.warning("environment_unknown", reason=stray)
    try:
        return serve(settings, reload)
    finally:
        logs.tell_suppressed(log)


def _refuse(error: Any, arguments: argparse.Namespace) -> int:
    """Every problem on standard error, as JSON too where that was asked for."""
    from kvslot.daemon import config

    warnings = config.strays(os.environ)  # what was meant for a setting may be why there is a problem
    for each in warnings:
        print(f"kvslotd: warning: {each}", file=sys.stderr)
    for problem in error.problems:
        print(f"kvslotd: {problem}", file=sys.stderr)
    if error.problems == ["no pool is configured"]:
        print(
            "\nA daemon serves at least one pool.  Give --config FILE with, for example,\n\n"
            + "".join(f"    {line}".rstrip() + "\n" for line in EXAMPLE.splitlines())
            + "\nor --demo for a small one to try things on.",
            file=sys.stderr,
        )
    if arguments.check_config and arguments.json is not None:
        import msgspec

        from kvslot.daemon.device.memory import available

        result = {
            "ok": False,
            "problems": error.problems,
            "warnings": warnings,
            "admin": [],
            "settings": None,
            "origins": {},
            "pools": [],
            "memory": msgspec.to_builtins(available()),
        }
        _write_json(result, arguments.json)
    return CONFIG


def _check(effective: Effective, sums: list[PoolSum], json: str | None) -> int:
    """Prints what the settings come to."""
    import msgspec

    from kvslot.daemon import config
    from kvslot.daemon.device.memory import available

    memory = available()
    problems: list[str] = []
    warnings = config.strays(os.environ)
    try:
        config.check_memory(sums, memory)
    except config.ConfigError as error:
        # What is short now may be free when the daemon starts, say because it runs; what no machine like this one has
        # never is.
        short = sum(each.size_bytes for each in sums) <= memory.total_bytes
        (warnings if short else problems).extend(error.problems)
    # A daemon serves engines without its admin API, so that none of this keeps it from starting.
    admin, hints = _admin_problems(effective.settings)
    warnings += admin + hints
    if json is not None:
        result = {
            "ok": not problems,
            "problems": problems,
            "warnings": warnings,
            "admin": admin,
            "settings": msgspec.to_builtins(effective.settings),
            "origins": effective.origins,
            "pools": [msgspec.to_builtins(each) for each in sums],
            "memory": msgspec.to_builtins(memory),
        }
        _write_json(result, json)
    if json != "-":
        sys.stdout.write(config.dump(effective, sums))
    for each in warnings:
        print(f"kvslotd: warning: {each}", file=sys.stderr)
    for each in problems:
        print(f"kvslotd: {each}", file=sys.stderr)
    return CONFIG if problems else OK


def _admin_problems(settings: Settings) -> tuple[list[str], list[str]]:
    """Of what the admin API needs, token files, the port, a folder: what would not do, and what might not."""
    if not settings.admin or not (settings.admin_tcp or settings.admin_socket):
        return [], []
    from kvslot.daemon import doors  # a third of a second

    return doors.problems(settings), doors.hints(settings)


def _write_json(result: object, where: str) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    if where == "-":
        sys.stdout.write(text)
        return
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    Path(where).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
