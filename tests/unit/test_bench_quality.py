"""Perplexity and argmax agreement, and the windows of the text that they are taken on."""

import math

import pytest

from warmroot.deploy.bench.peers.warmroot_model import weights_format
from warmroot.deploy.bench.quality import QualitySizes, Scores, compare, sample_text, text_facts, windows


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_perplexity_and_agreement() -> None:
    reference = Scores([math.log(0.5), math.log(0.125)], [1, 2], [0.5, 0.001])
    assert reference.perplexity == pytest.approx(4.0)
    found = compare(Scores([math.log(0.5), math.log(0.5)], [1, 3], [0.5, 0.5]), reference)
    assert found["perplexity"] == pytest.approx(2.0) and found["perplexity_ratio"] == pytest.approx(0.5)
    assert found["argmax_agreement"] == 0.5
    # The token on which they differ was a tie for the reference.
    assert found["argmax_agreement_without_ties"] == 1.0 and found["near_ties"] == 0.5
    assert found["max_logprob_difference"] == pytest.approx(math.log(4))


def test_windows_are_consecutive_and_whole() -> None:
    found = windows(encode, QualitySizes(num_windows=3, window=50))
    assert [len(window) for window in found] == [50, 50, 50]
    assert text_facts(found)["tokens"] == 3 * 49
    assert [token for window in found for token in window] == windows(encode, QualitySizes(1, 150))[0]


def test_the_text_is_prose() -> None:
    paragraphs = sample_text().split("\n\n")
    assert len(paragraphs) > 100
    assert all(paragraph.endswith(".") and "\n" not in paragraph for paragraph in paragraphs)


@pytest.mark.parametrize(
    ("precision", "dtype", "quantization"),
    [("fp32", "float32", "none"), ("bf16", "bfloat16", "none"), ("int8", "auto", "int8"), ("q4_1", "auto", "auto")],
)
def test_precisions_as_configuration(precision: str, dtype: str, quantization: str) -> None:
    assert weights_format(precision) == (dtype, quantization)
