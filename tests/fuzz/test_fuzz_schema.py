"""The OpenAPI document against what the server does: statuses, content types and bodies are those that it describes."""

import os
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from fuzz_api import TinyApi
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

EXAMPLES = int(os.environ.get("WARMROOT_FUZZ_EXAMPLES", "25"))
EXAMPLE_SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="WARMROOT_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
ELSEWHERE = {
    "positive_data_acceptance",  # a schema cannot say that ids lie in a vocabulary, or that a prompt fits
    "ignored_auth",  # keys are tested with keys: test_openai_server
    "not_a_server_error",  # 503 and 504 are answers; that no other comes is checked here
    "unsupported_method",  # it sends requests of its own, over another loop
}
load_all_checks()
CHECKED = [check for check in CHECKS.get_all() if getattr(check, "__name__", "") not in ELSEWHERE]


class Described(TinyApi):
    """Sends schemathesis' cases over the engine's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.schema = schemathesis.openapi.from_dict(self.app.openapi())
        self.schema.config.update(base_url="http://test")
        self.operations = {
            f"{found.ok().method.upper()} {found.ok().path}": found.ok() for found in self.schema.get_all_operations()
        }

    def send(self, case: Any) -> httpx.Response:
        kwargs = case.as_transport_kwargs(base_url="http://test")
        kwargs.pop("cookies", None)
        answer = self.run(self._send(kwargs))
        self.check_idle()
        return answer

    async def _send(self, kwargs: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(**kwargs)


@pytest.fixture(scope="module")
def api():
    api = Described()
    yield api
    api.close()


def test_every_path_is_described(api):
    paths = {route.path.replace("{model:path}", "{model}") for route in api.app.routes if route.include_in_schema}
    assert {name.split(" ")[1] for name in api.operations} == paths


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_described(api, mode):
    for operation in api.operations.values():
        _check(api, operation, mode)


def _check(api: Described, operation: Any, mode: GenerationMode) -> None:
    try:
        cases = operation.as_strategy(generation_mode=mode)
    except schemathesis.errors.InvalidSchema:
        return

    @EXAMPLE_SETTINGS
    @given(cases)
    def send(case: Any) -> None:
        answer = api.send(case)
        assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text
        case.validate_response(answer, checks=CHECKED)

    with suppress(Unsatisfiable):  # nothing can be wrong with a request that has no parts
        send()
