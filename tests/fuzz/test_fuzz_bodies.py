"""Whatever a body says: an answer that adds up, or an error that names the field. And the engine is idle afterwards."""

import pytest
from fuzz_api import TinyApi, check_answer, parsed
from fuzz_bodies import CHAT_BODIES, COMPLETION_BODIES, texts_of
from fuzz_examples import examples
from hypothesis import given

LONG_OR_SHORT = examples(150)


@pytest.fixture(scope="module")
def api():
    api = TinyApi()
    yield api
    api.close()


@LONG_OR_SHORT
@given(body=texts_of(CHAT_BODIES))
def test_chat(api, body):
    check_answer(api.post("/v1/chat/completions", body), parsed(body))


@LONG_OR_SHORT
@given(body=texts_of(COMPLETION_BODIES))
def test_completions(api, body):
    check_answer(api.post("/v1/completions", body), parsed(body))
