"""Figures with every label in use, without a daemon: what the pages about metrics are compared with."""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from prometheus_client.core import Metric

from kvslot.api.admin import metrics
from kvslot.api.admin.views import AdminStats

Kind = TypeVar("Kind", bound=msgspec.Struct)


def families() -> Iterator[Metric]:
    """Every family of ours, each with a sample of each label."""
    yield from metrics.families(daemon(), [pool()], [step()])


def daemon() -> metrics.Daemon:
    """Of a process, with one of everything."""
    return _filled(
        metrics.Daemon,
        sessions={"live": 1, "lost": 0, "ending": 0},
        requests={"Allocate": 3},
        refused=[metrics.Refused(verb="Allocate", code="NotFound", count=1)],
        pushes={"ready": 1},
        log_events={"info": 5},
        tenants=[metrics.Tenant(tenant="t", sessions=1, sessions_max=2, refused={"sessions": 1})],
        admin=AdminStats(),
        checks={"device": True},
    )


def pool() -> metrics.Pool:
    """Of a pool, with one of everything."""
    return _filled(
        metrics.Pool,
        pool="default",
        usable_run_pct={"1": 100.0, "2": 50.0},
        waiting={"new": 1, "growth": 0, "commit": 0},
        later=[metrics.Later(reason="memory", count=2)],
        accounts=[metrics.Account(tenant="t", charged=1, unwritten=0, slots_max=5)],
        compaction=_filled(metrics.Compaction, mode="idle", state="settled"),
    )


def step() -> metrics.Step:
    """Of one verb."""
    return metrics.Step(verb="Allocate", step="applied", sampled=3, seconds=1e-5, classes=[0] * 11 + [2, 1])


def _filled(kind: type[Kind], **given: Any) -> Kind:
    """A struct of figures whose numbers are 1, and whose texts are short."""
    plain = {"int": 1, "float": 1.0, "str": "x", "bool": False}
    fields = {
        each.name: plain[str(each.type.__name__)]
        for each in msgspec.structs.fields(kind)
        if each.name not in given
    }
    return kind(**fields, **given)
