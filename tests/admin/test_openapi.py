"""The OpenAPI document, and the daemon against it: whatever is asked, each answer is one that the document describes.

Schemathesis makes requests that fit the document and requests that do not, and checks status, headers and body of every
answer.  Few of each by default; KVSLOT_EXAMPLES=500 asks for more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from kvslot.api.admin import ROUTES
from kvslot.api.admin.openapi import document
from kvslot.api.wire.messages import Allocate, Commit, Free

from ..tools.daemon import Running, running
from ..tools.wire import Wire, tokens
from .http import Client

EXAMPLES = int(os.environ.get("KVSLOT_EXAMPLES", "3"))
TOKEN = "0123456789abcdef0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}

LEFT_OUT = "^/v1/(events|acts/drain)$"
"""One has no end, the other is one: they have tests of their own."""

schema = schemathesis.openapi.from_dict(json.loads(msgspec.json.encode(document(ROUTES, (), "1"))))
fuzzed = schema.exclude(path_regex=LEFT_OUT)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """On TCP, with a token that may act, and something cached."""
    file = tmp_path_factory.mktemp("t") / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    with running(admin_tcp="127.0.0.1:0", admin_act_token_file=file) as daemon, Wire(daemon.socket) as wire:
        space = wire.hello("engine").namespace
        wire.call(Allocate, space, 1, tokens(100))
        wire.call(Commit, 1, 100)
        wire.call(Free, 1)
        yield daemon
        wire.bye()


def address(daemon: Running) -> tuple[str, int]:
    """Where it serves TCP, by its log."""
    line = next(line for line in daemon.text().splitlines() if '"admin_ready"' in line)
    host, _, port = json.loads(line)["tcp"].rpartition(":")
    return host, int(port)


CHECKS: list[Any] = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    unsupported_method,
    not_a_server_error,
]


@fuzzed.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_every_response_validates(case: schemathesis.Case[Any], daemon: Running) -> None:
    """Requests that fit are answered as described; those that do not are refused as described; nothing is a 5xx."""
    host, port = address(daemon)
    case.call_and_validate(base_url=f"http://{host}:{port}", headers=BEARER, checks=CHECKS)


def test_the_document_is_served_and_whole(daemon: Running) -> None:
    """What is served is 3.1, names every route, and refers to nothing that it lacks."""
    with Client(address(daemon), BEARER) as client:
        answer = client.get("/openapi.json")
    assert answer.status == 200
    found = answer.json()
    assert found["openapi"].startswith("3.1.")
    for route in ROUTES:
        assert route.method.lower() in found["paths"][route.path]
    assert "/metrics" in found["paths"]
    text = answer.body.decode()
    names = set(found["components"]["schemas"])
    for part in text.split('"$ref":"')[1:]:
        reference = part.partition('"')[0]
        assert reference.removeprefix("#/components/schemas/") in names
    identifiers = [each["operationId"] for path in found["paths"].values() for each in path.values()]
    assert len(identifiers) == len(set(identifiers))


def test_fields_are_described(daemon: Running) -> None:
    """Every figure of fragmentation has its definition, and most fields of other views say what they are."""
    schemas = document(ROUTES, (), "1")["components"]["schemas"]
    fields = [field for each in schemas.values() for field in each.get("properties", {}).values()]
    told = [field for field in fields if "description" in field]
    assert len(told) > len(fields) / 3
