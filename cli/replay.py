"""`kvslotctl replay`: recorded traces through every way of managing a KV cache, as a table, JSON and a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvslot.cli import _common

if TYPE_CHECKING:
    from kvslot.replay import Case, ReplayConfig, ReplayResult, Trace
    from kvslot.replay.processes import ProcessSettings

DESCRIPTION: Final = """\
Replay recorded serving traces through a policy of managing the KV cache and print what it costs and finds: one table
per trace and block size, one column a policy. Time is simulated, the policies are real code on the trace's token ids.
TRACE is a .kvs.gz file or the name of a bundled trace (--list)."""

EPILOG: Final = f"""\
examples:
  kvslotctl replay --demo
  kvslotctl replay mix200_a --policy all --pool-tokens 400000
  kvslotctl replay sgd_a mtbench101_a --policy paged slotted --block-size 16 64 528 2048
  kvslotctl replay sharegpt_a --policy slotted --engines 4 --routing random --sharing both
  kvslotctl replay mix200_a --policy hashed slotted --via socket --clients 4
  kvslotctl replay sgd_a --policy slotted --compaction idle --html=moves.html
  kvslotctl replay mix200_a --policy slotted --via socket --compaction forced --night 0.6
  kvslotctl replay mix200_a --policy slotted --hours 72 --no-optimum --json=long.json
  kvslotctl replay my.kvs.gz --policy all --json --html=report.html > rows.json

{_common.EXIT_CODES}"""

EVICTIONS: Final = ("lru", "s3fifo", "gaps")
"""The core's, written out: building the parser loads no room.  A test compares."""

COMPACTIONS: Final = ("off", "idle", "forced")

POLICIES: Final = ("contiguous", "paged", "hashed", "token", "slotted", "all")
"""For completion; written out for the same reason, and compared, too."""

DEMO_FOLDER: Final = Path("build/replay")

Number = TypeVar("Number", int, float)


def add(subparsers: _common.Subparsers) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "replay",
        help="replay recorded serving traces and compare policies",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=run)
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        choices=_common.Suggested(_traces),
        help="a .kvs.gz file, or the name of a bundled trace",
    )
    parser.add_argument("--list", action="store_true", help="list the bundled traces and leave")
    parser.add_argument(
        "--demo", action="store_true", help="a selection that shows gains and nothings, a minute or two"
    )

    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--policy",
        nargs="+",
        default=["all"],
        metavar="NAME",
        choices=_common.Suggested(lambda: POLICIES),
        help="contiguous, paged, hashed, token, slotted, or all (default)",
    )
    what.add_argument(
        "--block-size", nargs="+", type=_count, default=[16], metavar="N", help="slots a block (16)"
    )
    size = what.add_mutually_exclusive_group()
    size.add_argument(
        "--pool-tokens", type=_count, metavar="N", help="slots in the pool, all engines together"
    )
    size.add_argument(
        "--pool-factor",
        type=_positive,
        default=1.5,
        metavar="F",
        help="pool as a multiple of the most distinct tokens that run at once (1.5)",
    )
    what.add_argument(
        "--eviction",
        choices=EVICTIONS,
        default=EVICTIONS[0],
        help="order of eviction (lru); policies that have only lru keep it",
    )
    what.add_argument(
        "--watermark", type=_share, default=0.02, metavar="F", help="held back from new requests (0.02)"
    )
    what.add_argument(
        "--unsplit", action="store_true", help="slotted never splits a piece to fill a hole, for comparison"
    )
    what.add_argument(
        "--page",
        type=_count,
        default=1,
        metavar="N",
        help="slotted, for kernels that read whole pages of N slots: what is put together anew is copied_tokens (1)",
    )
    what.add_argument(
        "--compaction",
        choices=COMPACTIONS,
        default=COMPACTIONS[0],
        help="slotted three times, to tell what each means is worth: placement alone, with eviction that empties "
        "blocks, and with moves: idle, in gaps between steps, or forced, to rest again and again (off: once, no "
        "moves); via a socket once, by the daemon",
    )
    what.add_argument("--engines", type=_count, default=1, metavar="N", help="engines that take requests (1)")
    what.add_argument(
        "--routing", choices=("sticky", "random"), default="sticky", help="who takes a request (sticky)"
    )
    what.add_argument(
        "--sharing",
        choices=("shared", "partitioned", "both"),
        default="shared",
        help="one pool for all engines, or an N-th of the memory for each (shared)",
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--live", type=_count, default=64, metavar="N", help="sequences that run at once at most (64)"
    )
    load.add_argument(
        "--hours", type=_positive, metavar="H", help="go round the trace with new sessions for H hours"
    )
    clock = load.add_mutually_exclusive_group()
    clock.add_argument(
        "--rate", type=_positive, metavar="R", help="R requests a second, Poisson, in place of the clock"
    )
    clock.add_argument(
        "--closed-loop", action="store_true", help="no clock: as many requests as --live allows"
    )
    load.add_argument("--requests", type=_count, metavar="N", help="only the first N requests of a trace")
    load.add_argument(
        "--prefill-us", type=_positive, default=100.0, metavar="T", help="per prompt token (100)"
    )
    load.add_argument("--decode-ms", type=_positive, default=20.0, metavar="T", help="per output token (20)")
    load.add_argument(
        "--ramp",
        type=_seconds,
        metavar="S",
        help="closed loop: seconds to fill up (a mean request's time; 0: at once)",
    )
    load.add_argument(
        "--step-gap-us",
        type=_microseconds,
        default=200.0,
        metavar="T",
        help="compaction idle: microseconds after each decode step in which the device has nothing to do (200)",
    )
    load.add_argument(
        "--copy-tokens-s",
        type=_positive,
        default=40_000.0,
        metavar="N",
        help="compaction idle: tokens copied in a second (40000: 5 GB/s at 128 KiB a token)",
    )
    load.add_argument("--seed", type=_seed, default=0, metavar="N", help="for routing and --rate (0)")

    real = parser.add_argument_group("real processes")
    real.add_argument(
        "--via",
        choices=("inproc", "socket"),
        default="inproc",
        help="slotted in this process (default), or by client processes of a daemon that write and read the memory",
    )
    real.add_argument("--clients", type=_count, default=4, metavar="N", help="client processes (4)")
    real.add_argument(
        "--socket",
        default="",
        metavar="PATH",
        help="of a running daemon; without it one is started for the run",
    )
    real.add_argument(
        "--night",
        type=_share,
        metavar="F",
        help="compaction forced: before each, the cache is evicted to F of the slots as in a quiet night (not at all)",
    )
    # For tests of this very command: kill a client once a share of the requests is admitted (CLIENT:SHARE), or have one
    # go wrong by some slots (CLIENT:ADMISSION:SLOTS).
    real.add_argument("--kill-client", default="", help=argparse.SUPPRESS)
    real.add_argument("--plant", default="", help=argparse.SUPPRESS)

    out = parser.add_argument_group("output")
    _common.add_json(out)
    out.add_argument("--html", metavar="FILE", help="write a self-contained page with plots")
    out.add_argument("--phases", action="store_true", help="a table for every phase, not only the whole run")
    out.add_argument("--no-optimum", action="store_true", help="skip the offline optimum")
    out.add_argument(
        "--max-live-search",
        nargs="?",
        type=_count,
        const=1024,
        metavar="LIMIT",
        help="search for max_concurrent_sessions up to LIMIT (1024): some ten more runs each",
    )
    parser.set_defaults(defaults=vars(parser.parse_args([])))


def _count(text: str) -> int:
    value = _number(text, int, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _seed(text: str) -> int:
    return _number(text, int, "a whole number")


def _positive(text: str) -> float:
    value = _number(text, float)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _seconds(text: str) -> float:
    value = _number(text, float)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def _microseconds(text: str) -> float:
    return _seconds(text)


def _share(text: str) -> float:
    value = _number(text, float)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more and below 1")
    return value


def _number(text: str, kind: Callable[[str], Number], what: str = "a number") -> Number:
    """Says what to do about the likeliest mistake: a TRACE after an option that takes several values."""
    try:
        return kind(text)
    except ValueError:
        hint = "; name traces first, before the options" if _names_a_trace(text) else ""
        raise argparse.ArgumentTypeError(f"{text} is not {what}{hint}") from None


def _traces() -> list[str]:
    from kvslot.replay import bundled

    return list(bundled())


def _names_a_trace(text: str) -> bool:
    from kvslot.replay import bundled

    return text.endswith(".kvs.gz") or text in bundled()


def run(arguments: argparse.Namespace) -> int:
    """The command: exit code."""
    from kvslot.api.wire import KvslotError
    from kvslot.replay import PolicyFault, TraceError
    from kvslot.replay.processes import DaemonFault, ProcessFault

    try:
        problem = _misused(arguments)
        if problem:
            return _usage(problem)
        if arguments.list:
            return _list()
        for where in (arguments.json, arguments.html):
            _common.check_writable(where)
        return _demo(arguments) if arguments.demo else _replay(arguments)
    except TraceError as error:
        print(f"kvslotctl replay: {error}", file=sys.stderr)
        return _common.BAD_INPUT
    except PolicyFault as error:
        print(f"kvslotctl replay: a policy broke its contract: {error}", file=sys.stderr)
        return _common.FAULT
    except ProcessFault as error:
        print(f"kvslotctl replay: {error}", file=sys.stderr)
        return _common.FAILED
    except DaemonFault as error:
        print(f"kvslotctl replay: {error}", file=sys.stderr)
        return _common.FAULT
    except KvslotError as error:
        print(f"kvslotctl replay: {error}", file=sys.stderr)
        return _common.UNREACHABLE
    except BrokenPipeError:
        raise  # a reader that has left, not a file that cannot be written
    except OSError as error:
        print(f"kvslotctl replay: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return _common.BAD_INPUT


VIA_SOCKET: Final = frozenset({"clients", "socket", "night", "kill_client", "plant"})
"""Options that mean something only where real processes take part."""
DEMO_TAKES: Final = frozenset({"demo", "json", "html", "phases", "seed"}) | VIA_SOCKET - {"night"}
"""What `--demo` heeds; its traces, policies and pools are its own."""


def _misused(arguments: argparse.Namespace) -> str:
    """What of the command line would be passed over in silence, and what to do about it; "" for nothing."""
    given = [name for name, value in arguments.defaults.items() if getattr(arguments, name) != value]
    for alone, takes in (("list", frozenset({"list"})), ("demo", DEMO_TAKES)):
        more = [name for name in given if name not in takes]
        if getattr(arguments, alone) and more:
            what = "TRACE" if more[0] == "traces" else f"--{more[0].replace('_', '-')}"
            return f"--{alone} takes no {what}; leave one of them out"
    for option in ("json", "html"):
        name = getattr(arguments, option)
        if name not in (None, "-") and _names_a_trace(name):
            return f"--{option} {name} would write a file of that name; name traces first, or write --{option}=./{name}"
    if not arguments.traces and not arguments.demo and not arguments.list:
        swallowed = [name for name in arguments.policy if _names_a_trace(name)]
        if swallowed:
            rest = [name for name in arguments.policy if name not in swallowed]
            return (
                f"{swallowed[0]} was taken for a policy; name traces first: "
                f"kvslotctl replay {' '.join(swallowed)} --policy {' '.join(rest) or 'all'}"
            )
        return "name a TRACE, or ask for --demo or --list"
    for name in given:
        if name in VIA_SOCKET and arguments.via != "socket" and not arguments.demo:
            return f"--{name.replace('_', '-')} is about real processes; give --via socket, too"
    if arguments.via == "socket" and arguments.page > 1:
        return "--page is for replays in this process; leave --via socket out"
    for name in ("step_gap_us", "copy_tokens_s"):
        if name in given and (arguments.compaction != "idle" or arguments.via == "socket"):
            return (
                f"--{name.replace('_', '-')} is about moves in simulated gaps: --compaction idle --via inproc"
            )
    only_slotted = [name for name in ("page", "unsplit", "compaction") if name in given]
    if only_slotted and not {"slotted", "all"} & {
        part for name in arguments.policy for part in name.split(",")
    }:
        return f"--{only_slotted[0]} is slotted's alone; give --policy slotted, too"
    if arguments.engines == 1:
        for name in ("routing", "sharing"):
            if name in given:
                return f"--{name} is about several engines; give --engines N, too"
    if arguments.ramp is not None and arguments.rate is not None:
        return "--ramp is about closed loops, and --rate is none; leave one of them out"
    return ""


def _usage(problem: str) -> int:
    print(f"kvslotctl replay: {problem}. See kvslotctl replay --help", file=sys.stderr)
    return _common.USAGE


def _list() -> int:
    from rich.table import Table

    from kvslot.cli._tables import console
    from kvslot.replay import bundled, load

    table = Table(title="Bundled traces", title_justify="left", box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("kind")
    for title in ("requests", "prompt tokens", "longest"):
        table.add_column(title, justify="right")
    table.add_column("clock")
    for name, path in bundled().items():
        trace = load(path)
        table.add_row(
            name,
            trace.header.kind,
            f"{len(trace):,}",
            f"{sum(trace.prompt_len):,}",
            f"{trace.max_length:,}",
            "order only" if trace.t is None else f"{trace.t[-1] - trace.t[0]:,.0f} s",
        )
    console().print(table)
    return _common.OK


def _policies(names: list[str]) -> list[str]:
    """The policies asked for, in the table's order.  Raises ValueError for an unknown one."""
    from kvslot.replay.policies import NAMES, available

    wanted = [part for name in names for part in name.split(",") if part]
    if not wanted:
        raise ValueError(f"no policy is named; there are {', '.join(NAMES)} and all")
    unknown = [name for name in wanted if name not in (*NAMES, "all")]
    if unknown:
        raise ValueError(f"no policy is called {unknown[0]}; there are {', '.join(NAMES)} and all")
    return [name for name in NAMES if ("all" in wanted and available(name)) or name in wanted]


def _replay(arguments: argparse.Namespace) -> int:
    from kvslot.replay import Case, find, load, means, peak_live_tokens, run_cases
    from kvslot.replay.policies import evictions

    try:
        policies = _policies(arguments.policy)
        via = arguments.via
        if via == "socket" and "slotted" not in policies:
            return _usage("--via socket is about slotted: name it with --policy")
        if via == "socket" and arguments.max_live_search is not None:
            return _usage("--max-live-search is for --via inproc")
        if arguments.socket and via != "socket":
            return _usage("--socket PATH goes with --via socket")
        keep = [policy for policy in policies if arguments.eviction not in evictions(policy)]
        if keep:
            print(f"kvslotctl replay: {', '.join(keep)}: only lru, so lru it is", file=sys.stderr)
        cases: list[Case] = []
        for path in dict.fromkeys(find(name).resolve() for name in arguments.traces):
            trace = load(path)
            if arguments.requests:
                trace = trace.head(arguments.requests)
            for block_size in dict.fromkeys(arguments.block_size):
                base = _config(arguments, block_size)
                if arguments.pool_tokens is None:
                    peak = peak_live_tokens(trace, base)
                    base = _resize(base, int(arguments.pool_factor * peak))
                for sharing in (
                    ("shared", "partitioned") if arguments.sharing == "both" else (arguments.sharing,)
                ):
                    for policy in policies:
                        order = evictions(policy)[0] if policy in keep else arguments.eviction
                        case = Case(
                            trace,
                            _replace(base, policy=policy, sharing=sharing, eviction=order),
                            via if policy == "slotted" else "inproc",
                        )
                        if policy == "slotted" and via == "socket":
                            # A daemon's one way of evicting, and its own choice of moments.
                            cases.append(
                                case._replace(config=_replace(case.config, compaction=arguments.compaction))
                            )
                        elif policy == "slotted" and arguments.compaction != "off":
                            cases += means(case, arguments.compaction)
                        else:
                            cases.append(case)
        with _common.Bar() as bar:
            result = run_cases(
                cases,
                seed=arguments.seed,
                settings=_settings(arguments),
                with_optimum=not arguments.no_optimum,
                with_max_live=arguments.max_live_search is not None,
                max_live_limit=arguments.max_live_search or 1024,
                report=bar.report,
                processes=_processes(arguments),
            )
    except ValueError as error:
        from kvslot.replay import TraceError

        if isinstance(error, TraceError):
            raise
        return _usage(str(error))
    _show(result, arguments)
    return _common.OK


def _processes(arguments: argparse.Namespace) -> ProcessSettings:
    """How runs by real processes are carried out."""
    from kvslot.replay.processes import ProcessSettings

    kill = plant = None
    if arguments.kill_client:
        client, share = arguments.kill_client.split(":")
        kill = int(client), float(share)
    if arguments.plant:
        client, admission, slots = map(int, arguments.plant.split(":"))
        plant = client, admission, slots
    return ProcessSettings(
        clients=arguments.clients,
        socket=arguments.socket,
        night=arguments.night,
        kill=kill,
        plant=plant or (-1, 0, 0),
    )


def _config(arguments: argparse.Namespace, block_size: int) -> ReplayConfig:
    from kvslot.replay import ReplayConfig

    return ReplayConfig(
        policy="slotted",
        block_size=block_size,
        # Where the pool's size is yet to be found, anything that is large enough.
        pool_tokens=arguments.pool_tokens or 1 << 28,
        live=arguments.live,
        hours=arguments.hours,
        rate=arguments.rate,
        closed_loop=arguments.closed_loop,
        engines=arguments.engines,
        routing=arguments.routing,
        eviction=arguments.eviction,
        fill_holes=not arguments.unsplit,
        page=arguments.page,
        step_gap_us=arguments.step_gap_us,
        copy_tokens_s=arguments.copy_tokens_s,
        watermark=arguments.watermark,
        prefill_us=arguments.prefill_us,
        decode_ms=arguments.decode_ms,
        ramp_s=arguments.ramp,
        seed=arguments.seed,
    )


def _replace(config: ReplayConfig, **changes: object) -> ReplayConfig:
    import msgspec

    return msgspec.structs.replace(config, **changes)


def _resize(config: ReplayConfig, pool_tokens: int) -> ReplayConfig:
    """A pool of that many tokens, but no fewer than make sense of the block size."""
    return _replace(config, pool_tokens=max(pool_tokens, 4 * config.block_size * config.engines))


def _settings(arguments: argparse.Namespace) -> dict[str, float | int | str | bool | None]:
    names = (
        "pool_tokens",
        "pool_factor",
        "live",
        "hours",
        "rate",
        "closed_loop",
        "requests",
        "engines",
        "routing",
        "eviction",
        "unsplit",
        "page",
        "compaction",
        "step_gap_us",
        "copy_tokens_s",
        "watermark",
        "prefill_us",
        "decode_ms",
        "ramp",
        "via",
        "clients",
    )
    return {name: getattr(arguments, name) for name in names}


def _show(result: ReplayResult, arguments: argparse.Namespace) -> None:
    """Table, JSON and page, as asked for."""
    from kvslot.cli._tables import console, print_compaction, print_processes, print_tables

    if arguments.json is not None:
        _common.write_json(result.to_json(), arguments.json)
    if arguments.json != "-":
        print_tables(console(), result, all_phases=arguments.phases)
        print_compaction(console(), result)
        print_processes(console(), result)
    if arguments.html:
        result.write_html(Path(arguments.html))


# --- The demo ----------------------------------------------------------------------------------------------------


REAL: Final = (("mix200_a", 16), ("mix200_a", 528))
"""Traces and block sizes of the demo whose slotted column comes from real processes."""


def _demo_cases(seed: int, policies: list[str]) -> list[Case]:
    """Traces on which slots, token-exact sharing and one pool are worth much, little and nothing."""
    from kvslot.replay import Case, ReplayConfig, find, load

    def each(trace: Trace, pool_tokens: int, block_sizes: tuple[int, ...], **changes: object) -> list[Case]:
        return [
            Case(
                trace,
                _replace(
                    ReplayConfig(policy=policy, block_size=block_size, pool_tokens=pool_tokens, seed=seed),
                    **changes,
                ),
                "socket" if policy == "slotted" and (trace.name, block_size) in REAL else "inproc",
                beside=True,
            )
            for block_size in block_sizes
            for policy in policies
        ]

    cases = each(load(find("mix200_a")), 400_000, (16, 64, 528, 2048))
    cases += each(load(find("sgd_a")), 45_000, (16, 64))
    cases += each(load(find("mooncake_conversation_a")).head(1200), 2_000_000, (16, 2048))
    four = load(find("taubench_airline_a"))
    for sharing in ("partitioned", "shared"):
        cases += [
            Case(
                four,
                ReplayConfig(
                    policy=policy,
                    block_size=16,
                    pool_tokens=300_000,
                    engines=4,
                    routing="random",
                    sharing=sharing,
                    seed=seed,
                ),
            )
            for policy in policies
            if policy in ("hashed", "slotted")
        ]
    return cases


def _demo(arguments: argparse.Namespace) -> int:
    from kvslot.cli._tables import console, print_comparison, print_summary, print_tables
    from kvslot.replay import run_cases

    policies = _policies(["all"])
    cases = _demo_cases(arguments.seed, policies)
    with _common.Bar() as bar:
        result = run_cases(
            cases,
            seed=arguments.seed,
            settings={"demo": True},
            report=bar.report,
            processes=_processes(arguments),
        )
    out = console()
    as_json = Path(arguments.json) if arguments.json not in (None, "-") else DEMO_FOLDER / "demo.json"
    page = Path(arguments.html) if arguments.html else DEMO_FOLDER / "demo.html"
    if DEMO_FOLDER in (as_json.parent, page.parent):
        DEMO_FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.json == "-":
        _common.write_json(result.to_json(), "-")
    else:
        print_tables(out, result, all_phases=arguments.phases)
        print_comparison(out, result)
        print_summary(out, result)
        result.write_json(as_json)
        out.print(f"\nAll rows: {as_json}")
    result.write_html(page)
    if arguments.json != "-":
        out.print(f"The page:  {page}")
    return _common.OK
