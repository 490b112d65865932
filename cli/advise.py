"""`kvslotctl advise`: what a pool's settings would better be, for a recorded load or for the one of now."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvslot.cli import _common, _control
from kvslot.cli.record import GOOD_ENDS, duration, pool_of, record

if TYPE_CHECKING:
    from rich.console import Console

    from kvslot.api.client import Control
    from kvslot.replay import AdviceResult, Recording, Trace

DESCRIPTION: Final = """\
Say what a pool's settings would better be for a load: replay it with the present ones, then with other block sizes,
orders of eviction, ways to append, pool sizes, watermarks and with moves, one changed at a time, and say for each
setting what to do, why, and by how much. Less than half a point of hits, or what may be chance, is no reason to change
anything. For comparison it also replays other ways of managing a KV cache.

TRACE is what `kvslotctl record` wrote, which knows the settings of its pool; or any trace that `kvslotctl replay`
takes, where what is not said is assumed. With --live, the load of a running daemon is recorded first."""

EXAMPLES: Final = """\
  kvslotctl advise load.kvs.gz
  kvslotctl advise --live --for 10m
  kvslotctl advise --live --for 1h --keep load.kvs.gz --json advice.json
  kvslotctl advise sharegpt_a --block-size 64 --pool-tokens 300000 --requests 3000
  kvslotctl advise load.kvs.gz --json | jq -r '.advice[] | select(.change) | "\\(.setting) = \\(.advised)"'
"""

LIVE_S: Final = 60.0
EVICTIONS: Final = ("lru", "s3fifo", "gaps")
APPENDS: Final = ("chain", "peel")
REQUESTS: Final = 20_000
"""The replay's, written out: building the parser loads no room.  A test compares."""


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = _control.add_command(
        subparsers, "advise", "say which settings a load would want", DESCRIPTION, EXAMPLES, run
    )
    trace = parser.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a .kvs.gz file, or the name of a bundled trace"
    )
    _common.takes_file(trace)
    live = parser.add_argument_group("the load of now")
    live.add_argument("--live", action="store_true", help="record a running daemon first, in place of TRACE")
    live.add_argument(
        "--for", dest="seconds", type=duration, metavar="TIME", help="--live: how long: 90s, 10m, 2h (60s)"
    )
    keep = live.add_argument("--keep", metavar="FILE", help="--live: keep the trace in this file")
    _common.takes_file(keep)
    now = parser.add_argument_group(
        "the present settings", "where the trace does not say, or others are meant"
    )
    now.add_argument("--block-size", type=_count, metavar="N", help="slots a block (16)")
    now.add_argument(
        "--pool-tokens", type=_count, metavar="N", help="slots in the pool (1.5 times what runs at once)"
    )
    now.add_argument("--eviction", choices=EVICTIONS, help="order of eviction (lru)")
    now.add_argument("--append", choices=APPENDS, help="behind a shared partial slot (chain)")
    now.add_argument("--watermark", type=_share, metavar="F", help="held back from new requests (0.02)")
    now.add_argument(
        "--page", type=_count, metavar="N", help="slots of the pages that kernels read whole (1)"
    )
    now.add_argument("--engines", type=_count, metavar="N", help="that share the pool (1)")
    load = parser.add_argument_group("the replays")
    load.add_argument(
        "--requests",
        type=_count,
        default=REQUESTS,
        metavar="N",
        help=f"only the first N of the trace ({REQUESTS}); ten runs or more are made of them",
    )
    load.add_argument(
        "--sizes", nargs="+", type=_count, metavar="N", help="block sizes to try (8 16 32 64 128 256)"
    )
    load.add_argument("--live-most", type=_count, metavar="N", help="sequences that run at once at most")
    load.add_argument(
        "--rate", type=_positive, metavar="R", help="R requests a second, in place of the clock"
    )
    load.add_argument(
        "--prefill-us", type=_positive, metavar="T", help="per prompt token (as recorded, or 100)"
    )
    load.add_argument(
        "--decode-ms", type=_positive, metavar="T", help="per output token (as recorded, or 20)"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="for --rate (0)")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more and below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    if arguments.live == bool(arguments.trace):
        what = "both are given" if arguments.live else "neither is given"
        return _control.fail(arguments, f"name a TRACE, or ask for --live: {what}", _common.USAGE)
    if not arguments.live:
        for name, value in (
            ("for", arguments.seconds),
            ("keep", arguments.keep),
            ("socket", arguments.socket),
        ):
            if value:
                return _control.fail(arguments, f"--{name} goes with --live", _common.USAGE)
        try:
            _common.check_writable(arguments.json)
        except OSError as error:
            return _control.fail(
                arguments, f"cannot write {arguments.json}: {error.strerror}", _common.BAD_INPUT
            )
        return _advise(arguments, arguments.trace)
    with tempfile.TemporaryDirectory(prefix="kvslot-") as folder:
        path = Path(arguments.keep or Path(folder) / "live.kvs.gz")
        code = _control.ask(arguments, lambda control: _record(control, arguments, path))
        return code or _advise(arguments, str(path))


def _record(control: Control, arguments: argparse.Namespace, path: Path) -> int:
    """The live load, for a while."""
    from kvslot.replay import TraceFile

    seconds = arguments.seconds or LIVE_S
    pool = pool_of(control, arguments.pool)
    try:
        _common.check_writable(str(path))
        file = TraceFile(path)
    except FileExistsError:
        return _control.fail(arguments, f"{path} is there already", _common.BAD_INPUT)
    except OSError as error:
        return _control.fail(arguments, f"cannot write {path}: {error.strerror}", _common.BAD_INPUT)
    with file, _common.Bar() as bar:

        def tell(recording: Recording, so_far: float) -> None:
            bar.report(f"recording · {_common.several(recording.begun, 'request')}", so_far / seconds)

        load, ended = record(control, pool, seconds=seconds, file=file, report=tell)
    if not load.requests:
        file.abandon()
        return _control.fail(
            arguments,
            f"nothing was asked of pool {pool.name!r} in {load.seconds:.0f} s; record for longer with --for",
            _common.FAILED,
        )
    if ended not in GOOD_ENDS:
        print(f"kvslotctl advise: the daemon ended: {ended}; going by what was recorded", file=sys.stderr)
    return _common.OK


def _advise(arguments: argparse.Namespace, name: str) -> int:
    from kvslot.replay import PolicyFault, TraceError, advise, find, load, present_of

    try:
        trace = load(find(name))
        whole = len(trace)
        trace = trace.head(arguments.requests)
        present = present_of(
            trace,
            block_size=arguments.block_size,
            pool_tokens=arguments.pool_tokens,
            eviction=arguments.eviction,
            append=arguments.append,
            watermark=arguments.watermark,
            page=arguments.page,
            engines=arguments.engines,
        )
        with _common.Bar() as bar:
            found = advise(
                trace,
                present,
                **({} if arguments.sizes is None else {"block_sizes": arguments.sizes}),
                live=arguments.live_most,
                rate=arguments.rate,
                prefill_us=arguments.prefill_us,
                decode_ms=arguments.decode_ms,
                seed=arguments.seed,
                report=bar.report,
            )
    except TraceError as error:
        return _control.fail(arguments, str(error), _common.BAD_INPUT)
    except PolicyFault as error:
        return _control.fail(arguments, f"a policy broke its contract: {error}", _common.FAULT)
    except ValueError as error:
        return _control.fail(arguments, str(error), _common.USAGE)
    if arguments.json is not None:
        import msgspec

        from kvslot import __version__

        document = found.to_builtins()
        document["meta"] = {"command": "advise", "version": __version__, **document["meta"]}
        encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
        try:
            _common.write_json(encoded, arguments.json)
        except BrokenPipeError:
            raise
        except OSError as error:
            return _control.fail(
                arguments, f"cannot write {arguments.json}: {error.strerror}", _common.BAD_INPUT
            )
    if arguments.json != "-":
        _print(found, trace, whole)
    return _common.OK


def _print(found: AdviceResult, trace: Trace, whole: int) -> None:
    from kvslot.cli import _screen

    out = _screen.console()
    meta = found.meta
    now = found.tried[0].row
    part = f"the first {len(trace):,} of {whole:,} requests" if len(trace) < whole else f"{whole:,} requests"
    out.print(
        f"{meta['trace']} · {part} · {meta['prompt_tokens']:,} prompt tokens · clock: {meta['clock']}",
        style="bold",
    )
    text = (
        f"replayed with the present settings it finds {_screen.pct(round(now.hit_tokens_pct, 2))} of the prompt "
        f"tokens, of {_screen.pct(round(now.hit_tokens_pct_ideal, 2))} that were there to be found"
    )
    if meta["live_hit_tokens_pct"] is not None:
        text += f"; live it found {_screen.pct(round(meta['live_hit_tokens_pct'], 2))}"
    out.print(text + "\n")
    for each in found.advice:
        head = (
            f"{each.setting}: {each.now} -> {each.advised}"
            if each.change
            else f"{each.setting}: keep {each.now}"
        )
        if each.setting == "together":
            head = "all of that together"
        elif each.setting == "sharing":
            head = "sharing: one pool for all"
        out.print(_screen.words(head), style="bold" if each.change else None)
        out.print(f"  {_screen.words(each.reason)}")
    out.print()
    _table(out, found)
    for caution in meta["cautions"]:
        out.print(f"caution: {_screen.words(caution)}")
    changes = [each for each in found.advice if each.change]
    if not changes:
        out.print("Nothing to change.")


def _table(out: Console, found: AdviceResult) -> None:
    """Every replay in one line."""
    from kvslot.cli import _screen

    table = _screen.table(
        "replay",
        "hits",
        "gain",
        "evicted",
        "waste",
        "pieces/1k",
        "waited",
        "preempted",
        "runs free",
        left=("replay",),
    )
    for each in found.tried:
        row = each.row
        table.add_row(
            each.what,
            f"{row.hit_tokens_pct:.2f} %",
            "" if each.what == "now" else f"{each.gain:+.2f} ± {each.gain_error:.2f}",
            f"{row.evicted_tokens:,}",
            f"{row.internal_fragmentation_pct.mean:.2f} %",
            f"{row.extents_per_1k_tokens:.1f}",
            f"{row.refusals:,}",
            f"{row.preemptions:,}",
            "-" if row.usable_run_pct is None else f"{row.usable_run_pct:.1f} %",
        )
    out.print(table)
    out.print(
        "hits: prompt tokens found; gain: in points, with its standard error; waste: inside blocks; pieces/1k: that\n"
        "1,000 tokens lie in; waited: requests told to wait for memory; runs free: free memory in runs of 32 blocks"
    )


__all__ = ["add", "run"]
