"""The OpenAPI document: it is valid, and has every route with every error."""

import json
from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.routing import Route

from daemon.api.auth import Access
from daemon.api.events import Events
from daemon.api.health import health_of
from daemon.api.http_api import api_routes
from daemon.api.http_errors import STATUS, ZEROMQ_ONLY
from daemon.api.http_requests import Requests
from daemon.api.messages import ErrorReply
from daemon.api.openapi import document
from daemon.api.pushes import Pushes
from daemon.api.serving import generation_routes
from daemon.tenants import Client
from metrics.store import MetricStore
from tests.daemon.api.generator import FakeGenerator
from tests.kit.fakes import awaited


@pytest.fixture(scope="module")
def described() -> Any:
    return json.loads(document())


def test_it_is_valid(described: Any) -> None:
    validate(described)


def test_every_route_of_the_api_is_described_and_no_other(described: Any) -> None:
    store = MetricStore.local({})

    async def answer(request: Any, client: Client, since: int) -> Any:
        return ErrorReply(request.id, "engine", "")

    routes: list[Any] = api_routes(
        Requests(awaited(answer)),
        Events(1, store, max_clients=1),
        Pushes({}, store, 1),
        lambda client: health_of([], [], "", spare=False),
        Access(),
    )
    routes += generation_routes(FakeGenerator(), lambda outcome: None)
    served = {
        (route.path.replace("{model:path}", "{model}"), method)
        for route in routes
        if isinstance(route, Route) and route.path != "/" and not route.path.startswith("/live")
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    assert told == served | {("/healthz", "GET"), ("/readyz", "GET")}
    names = [each["operationId"] for methods in described["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names))


def test_every_error_of_every_request_names_its_codes(described: Any) -> None:
    seen: set[str] = set()
    for methods in described["paths"].values():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if "Codes: " in response["description"]:
                    codes = response["description"].split("Codes: ")[1].strip(".").split(", ")
                    own = {STATUS[code] for code in codes if code in STATUS and code != "bad_request"}
                    assert own <= {int(status)}, codes
                    seen |= set(codes)
    assert set(STATUS) - ZEROMQ_ONLY <= seen
