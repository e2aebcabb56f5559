"""Logits equal transformers', family by family, however the tokens are cut into steps."""

from itertools import pairwise

import pytest
import torch

TOLERANCE = 1e-3
PROMPTS = [
    [int(token) for token in torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(length))]
    for length in (45, 7, 30)
]


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_prompt_at_once(family_decoder, family_reference, paged):
    expected = reference_logits(family_reference, PROMPTS[0])
    assert expected.std() > 0.5  # a reference that says nothing would agree with anything
    assert_close(paged(family_decoder).step({0: PROMPTS[0]})[0], expected)


def test_chunked_prefill_then_decode(family_decoder, family_reference, paged):
    sequences, tokens = paged(family_decoder), PROMPTS[0]
    cuts = [0, 13, 14, 31, *range(32, 46)]
    logits = [sequences.step({0: tokens[a:b]})[0] for a, b in pairwise(cuts)]
    assert_close(torch.cat(logits), reference_logits(family_reference, tokens))


def test_decodes_and_prefills_in_one_step(family_decoder, family_reference, paged):
    sequences = paged(family_decoder)
    expected = [reference_logits(family_reference, tokens) for tokens in PROMPTS]
    long, short, late = PROMPTS
    found = [[], [], []]
    for chunks in (
        {0: long[:20], 1: short[:5]},
        {0: long[20:21], 1: short[5:6], 2: late[:17]},
        {2: late[17:29], 0: long[21:22], 1: short[6:7]},
        {0: long[22:44], 2: late[29:30]},
        {0: long[44:45]},
    ):
        for index, logits in sequences.step(chunks).items():
            found[index].append(logits)
    for logits, wanted in zip(found, expected, strict=True):
        assert_close(torch.cat(logits), wanted)


@pytest.mark.model
def test_smollm2(smollm2_path, smollm2_reference, paged):
    from warmroot.actors.models.loader import load_model

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 49152, (70,), generator=generator).tolist()
    expected = reference_logits(smollm2_reference, tokens)
    exact = load_model(smollm2_path, dtype="float32", device=torch.device("cpu"))
    sequences = paged(exact)
    assert_close(torch.cat([sequences.step({0: tokens[a:b]})[0] for a, b in ((0, 40), (40, 69), (69, 70))]), expected)

    half = load_model(smollm2_path, dtype="float16", device=torch.device("cpu"))
    rounded = paged(half).step({0: tokens})[0]
    assert (rounded - expected).abs().max() < 0.2
    assert torch.equal(rounded.argmax(-1), expected.argmax(-1))

    # The file's own blocks: the same weights, but inputs rounded to 8 bits. Random tokens have many near ties.
    packed = load_model(smollm2_path, dtype="auto", device=torch.device("cpu"))
    coarse = paged(packed).step({0: tokens})[0]
    assert (coarse - expected).abs().mean() < 0.4
    assert (coarse.argmax(-1) == expected.argmax(-1)).float().mean() > 0.75
