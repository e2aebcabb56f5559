"""Structured output of SmolLM2 in one process and over ranks, with drafts, and when there are too few pages."""

import json
import re

import pytest

from warmroot import LLM, SamplingParams
from warmroot.cluster.errors import InvalidRequestError
from warmroot.cluster.output_grammar import OutputGrammar

pytestmark = pytest.mark.model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-[01]\d-[0-3]\d"
PROMPT = "<|im_start|>user\nDescribe a person as JSON, with name, age and tags.<|im_end|>\n<|im_start|>assistant\n"
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4, "adaptive": False}
SLOW = ("pp 2", "drafts of n-grams")
LAYOUTS = {
    "one": {},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "drafts of n-grams": {"speculative_config": NGRAM},
    "drafts of layers": {
        "speculative_config": {"method": "layer_skip", "num_speculative_tokens": 3, "adaptive": False}
    },
    "too few pages": {"num_kv_blocks": 12, "enable_prefix_caching": False},
}
KEYS = {"max_num_seqs": 8, "num_kv_blocks": 200, "max_model_len": 128, "dtype": "float32"}


def requests() -> list[SamplingParams]:
    person, date = OutputGrammar.json_schema(PERSON), OutputGrammar("regex", DATE)
    drawn = [SamplingParams(grammar=person, seed=seed, max_tokens=90, logprobs=1) for seed in range(4)]
    greedy = [SamplingParams(grammar=grammar, temperature=0, max_tokens=90) for grammar in (person, date)]
    return [*drawn, *greedy, SamplingParams(temperature=0, max_tokens=20)]


def layouts(*left_out: str) -> list:
    marks = {layout: [pytest.mark.slow] if layout in SLOW else [] for layout in LAYOUTS}
    return [pytest.param(layout, marks=marks[layout]) for layout in LAYOUTS if layout not in left_out]


@pytest.fixture(scope="module")
def outputs():
    """By layout, the text of each request and why it ended."""
    found: dict[str, list[tuple[str, str | None]]] = {}

    def outputs(layout: str) -> list[tuple[str, str | None]]:
        if layout not in found:
            with LLM("smollm2", num_threads=2, progress=False, **KEYS | LAYOUTS[layout]) as llm:
                params = requests()
                answers = llm.generate([PROMPT] * len(params), params)
                found[layout] = [(one.text, one.completions[0].finish_reason) for one in answers]
        return found[layout]

    return outputs


def test_what_cannot_be_is_the_clients_error_and_nobody_elses():
    impossible = SamplingParams(grammar=OutputGrammar("regex", DATE), allowed_token_ids=(300, 301), max_tokens=20)
    broken = SamplingParams(grammar=OutputGrammar("regex", "("), max_tokens=20)
    good = SamplingParams(temperature=0, max_tokens=20)
    with LLM("smollm2", num_threads=2, progress=False, **KEYS) as llm:
        for params, reason in ((impossible, "no token is allowed"), (broken, "unclosed group")):
            with pytest.raises(InvalidRequestError, match=reason):
                llm.generate(PROMPT, params)
        [output] = llm.generate(PROMPT, good)
    assert len(output.completions[0].token_ids) > 0


@pytest.mark.parametrize("layout", layouts())
def test_outputs_keep_to_their_grammars(outputs, layout):
    *people, date, _ = outputs(layout)
    ended = [json.loads(text) for text, reason in people if reason == "stop"]
    assert len(ended) >= 4
    for person in ended:
        assert list(person) == ["name", "age", "tags"]
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"red", "green", "blue"}
    assert re.fullmatch(DATE, date[0])
    assert date[1] == "stop"


@pytest.mark.parametrize("layout", layouts("one", "tp 2"))
def test_they_are_the_same_however_they_are_computed(outputs, layout):
    """Tensor-parallel ranks may round otherwise; drafts of layers are drawn with numbers of their own."""
    same = slice(4, None) if layout == "drafts of layers" else slice(None)
    assert outputs(layout)[same] == outputs("one")[same]
