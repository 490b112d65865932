"""The OpenAPI 3.1 document, made from the table of routes and the types of the views: the only description there is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvslot.api.admin.views import Failure

if TYPE_CHECKING:
    from kvslot.api.admin.app import Mounted, Route

FAILURES: Final[dict[int, str]] = {
    400: "a parameter or argument that cannot be",
    401: "no token, or one that is not known (TCP only)",
    403: "this user or token may not act, or a page of another site asked",
    404: "no such pool, prefix or pin",
    405: "another method is meant",
    408: "the arguments did not arrive in time",
    409: "not now, or not as things stand",
    411: "arguments without their length",
    413: "too many arguments",
    415: "arguments that are not JSON",
    421: "a host that is not this daemon (Unix socket only)",
    500: "a fault of the daemon",
    503: "busy, or about to end",
}
COMMON: Final = (400, 401, 421, 500, 503)

TEMPLATE: Final = "#/components/schemas/{name}"


def document(routes: Iterable[Route], mounted: Iterable[Mounted], version: str) -> dict[str, Any]:
    """The whole document, as plain values."""
    routes = list(routes)
    types: list[Any] = [Failure]
    for route in routes:
        types += [each for each in (route.answer, route.body) if each is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=TEMPLATE)
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    for each in mounted:
        paths.setdefault(each.path, {})["get"] = {
            "summary": each.summary,
            "operationId": _name(each.path),
            "tags": ["views"],
            "responses": {
                "200": {
                    "description": "as it is",
                    "content": {each.content_type.partition(";")[0]: {"schema": {"type": "string"}}},
                },
                **_failures((401, 421, 500, 503), by_type),
            },
        }
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://spec.openapis.org/oas/3.1/dialect/base",
        "info": {
            "title": "kvslot admin API",
            "version": version or "0",
            "summary": "Look at a kvslot daemon, and control it",
            "description": "Views are open to whoever can connect to the Unix socket; acts need the permission that "
            "control verbs need. On TCP everything needs a token, and acts need one of the file for acts.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": "views"}, {"name": "acts"}],
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "on TCP"},
                "basic": {
                    "type": "http",
                    "scheme": "basic",
                    "description": "on TCP: any user, the token as password",
                },
            },
        },
    }


def _operation(route: Route, by_type: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    responses: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": by_type[repr(route.answer)]}
    for media, schema in route.media.items():
        content[media] = {"schema": schema}
    responses["200"] = {"description": "what was asked for", "content": content}
    failures = _failures(sorted({*COMMON, *route.failures}), by_type)
    if route.path in ("/healthz", "/readyz"):
        # The same view says why not.
        schema = {"anyOf": [by_type[repr(route.answer)], by_type[repr(Failure)]]}
        failures["503"]["content"] = {"application/json": {"schema": schema}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _name(route.path),
        "tags": ["acts" if route.act else "views"],
        "responses": {**responses, **failures},
    }
    if route.parameters:
        operation["parameters"] = [
            {
                "name": each.name,
                "in": "query",
                "required": False,
                "description": each.text,
                "schema": dict(each.schema),
            }
            for each in route.parameters
        ]
    if route.body is not None:
        operation["requestBody"] = {
            "required": any(field.required for field in msgspec.structs.fields(route.body)),
            "content": {"application/json": {"schema": by_type[repr(route.body)]}},
        }
    return operation


def _failures(statuses: Iterable[int], by_type: dict[str, Any]) -> dict[str, Any]:
    schema = by_type[repr(Failure)]
    return {
        str(status): {"description": FAILURES[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def _name(path: str) -> str:
    return path.strip("/").replace("v1/", "").replace("/", "_").replace("-", "_").replace(".", "_") or "page"
