"""The OpenAPI document against what the server does: statuses, content types and bodies are those that it describes."""

from typing import Any

import httpx
import pytest
from fuzz_api import TinyApi
from fuzz_described import check_operation, operations
from schemathesis.generation import GenerationMode


class Described(TinyApi):
    """Sends schemathesis' cases over the engine's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = list(operations(self.app.openapi(), "http://test"))

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
    assert {operation.path for operation in api.operations} == paths


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_described(api, mode):
    for operation in api.operations:
        check_operation(operation, mode, 25, api.send)
