"""Every reader of bytes, on valid inputs and on some hundred changed ones; ``make fuzz`` goes on from there."""

from itertools import islice
from random import Random

import pytest
from fuzz_found import FOUND
from fuzz_targets import TARGETS

NUM_INPUTS = {"client": 200, "gguf": 60, "gguf_tokenizer": 40, "trace": 60, "trace_csv": 60, "yaml_config": 60}
"""Where an input takes milliseconds."""


@pytest.mark.parametrize("name", TARGETS)
def test_reads_or_refuses(name):
    target = TARGETS[name]
    taken = [target.check(data) for data in islice(target.inputs(Random(0)), NUM_INPUTS.get(name, 150))]
    assert any(taken[: len(target.seeds())]), "no valid input is read"


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, inputs in FOUND.items() for data in inputs])
def test_what_was_found_once(name, data):
    assert not TARGETS[name].check(data), "it is refused, by an error that the reader documents"
