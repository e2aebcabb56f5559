"""Holds answers against the OpenAPI document, for any way to send requests."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import schemathesis
from fuzz_examples import examples
from hypothesis import given
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

ELSEWHERE = {
    "positive_data_acceptance",  # a schema cannot say that ids lie in a vocabulary, or that a prompt fits
    "ignored_auth",  # keys are tested with keys: test_openai_server
    "not_a_server_error",  # 503 and 504 are answers; that no other comes is checked here
    "unsupported_method",  # it sends requests of its own, over another loop
}
load_all_checks()
CHECKED = [check for check in CHECKS.get_all() if getattr(check, "__name__", "") not in ELSEWHERE]


def operations(document: dict[str, Any], base_url: str) -> Iterator[Any]:
    """All that the document describes."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base_url)
    for found in schema.get_all_operations():
        yield found.ok()


def check_operation(operation: Any, mode: GenerationMode, count: int, send: Callable[[Any], httpx.Response]) -> None:
    """Send ``count`` cases of an operation, and look whether each answer is one that it describes."""
    try:
        cases = operation.as_strategy(generation_mode=mode)
    except schemathesis.errors.InvalidSchema:
        return

    @examples(count)
    @given(cases)
    def check(case: Any) -> None:
        answer = send(case)
        assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text
        case.validate_response(answer, checks=CHECKED)

    with suppress(Unsatisfiable):  # nothing can be wrong with a request that has no parts
        check()
