"""Replay recorded serving traces through ways of managing a KV cache, and measure what each is worth.

The face of this room: `load` a trace (`find` resolves names of bundled ones), describe a run with `ReplayConfig`, then
`replay` one run, or `run_cases` for many into a `ReplayResult`.
"""

from kvslot.replay.advice import Advice, AdviceResult, Present, advise, present_of
from kvslot.replay.cases import Case, means, run_cases
from kvslot.replay.clairvoyant import Nodes
from kvslot.replay.engine import (
    Outcome,
    PolicyFault,
    ReplayConfig,
    max_concurrent_sessions,
    peak_live_tokens,
    replay,
)
from kvslot.replay.metrics import (
    PHASES,
    CompactionReport,
    Quantiles,
    QuietNight,
    ReplayResult,
    Row,
    Run,
    Spread,
)
from kvslot.replay.recording import Recording, TraceFile, load_of
from kvslot.replay.traces import (
    Expander,
    RecordedLoad,
    RecordedPool,
    Trace,
    TraceError,
    bundled,
    find,
    load,
)

__all__ = [
    "PHASES",
    "Advice",
    "AdviceResult",
    "Case",
    "CompactionReport",
    "Expander",
    "Nodes",
    "Outcome",
    "PolicyFault",
    "Present",
    "Quantiles",
    "QuietNight",
    "RecordedLoad",
    "RecordedPool",
    "Recording",
    "ReplayConfig",
    "ReplayResult",
    "Row",
    "Run",
    "Spread",
    "Trace",
    "TraceError",
    "TraceFile",
    "advise",
    "bundled",
    "find",
    "load",
    "load_of",
    "max_concurrent_sessions",
    "means",
    "peak_live_tokens",
    "present_of",
    "replay",
    "run_cases",
]
