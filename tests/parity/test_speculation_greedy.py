"""Greedy output with speculation equals greedy output without: every family, every method, and SmolLM2."""

import pytest
import torch

from warmroot.actors.models.loader import load_model
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.router.tokenizer import Tokenizer

from .greedy_harness import GreedyEngine

METHODS = {
    "ngram": SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=5, adaptive=False),
    "layer_skip": SpeculativeConfig(method="layer_skip", num_layers=3, num_speculative_tokens=3, adaptive=False),
    "draft_model": SpeculativeConfig(method="draft_model", model="itself", num_speculative_tokens=4, adaptive=False),
}
MAX_TOKENS = 30


def tokens(seed: int, length: int) -> list[int]:
    return torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = tokens(0, 21)
PROMPTS = [tokens(1, 2), SHARED + tokens(3, 9), SHARED[:18] + tokens(5, 3), tokens(6, 7) * 5, SHARED]


@pytest.mark.parametrize("method", METHODS)
def test_families(family_decoder, method):
    spec = family_decoder.spec
    uniform = len(set(spec.layer_windows)) == 1 and spec.layer_windows[0] is None
    options = {"max_num_seqs": 4, "speculation": METHODS[method]}
    draft = family_decoder if method == "draft_model" else None
    if draft is not None and not uniform:
        with pytest.raises(ConfigError, match=r"windows is not supported|have a sliding window"):
            GreedyEngine(family_decoder, options=options, draft=draft)
        return
    plain = GreedyEngine(family_decoder).generate(PROMPTS, MAX_TOKENS)
    groups = len(GreedyEngine(family_decoder).runner.layout.groups)
    for num_blocks in (400, 1 + groups * 21):
        engine = GreedyEngine(family_decoder, num_blocks=num_blocks, options=options, draft=draft)
        assert engine.generate(PROMPTS, MAX_TOKENS) == plain
        assert engine.generate(PROMPTS, MAX_TOKENS) == plain, "with cached prefixes"
        counts = engine.engine.speculator.counts
        assert counts.draft_tokens > 0
        if draft is not None:
            assert counts.accepted_tokens == counts.draft_tokens


TEXTS = [
    "The capital of France is",
    "one two three four, one two three four, one two three four, one two",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nRepeat this text word for word: The quick brown fox jumps over the lazy dog, and the dog barks"
    " at the fox.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.model
@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig(method="ngram", num_speculative_tokens=6),
        SpeculativeConfig(method="layer_skip", num_layers=20, num_speculative_tokens=3, adaptive=False),
        SpeculativeConfig(method="draft_model", model="itself", num_speculative_tokens=3, adaptive=False),
    ],
    ids=lambda config: config.method,
)
def test_smollm2(smollm2_path, config):
    decoder = load_model(smollm2_path, dtype="float32", device=torch.device("cpu"))
    tokenizer = Tokenizer.from_path(smollm2_path)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    plain = GreedyEngine(decoder, block_size=16).generate(prompts, 40)
    draft = decoder if config.method == "draft_model" else None
    engine = GreedyEngine(decoder, block_size=16, options={"speculation": config}, draft=draft)
    assert engine.generate(prompts, 40) == plain
    counts = engine.engine.speculator.counts
    print(config.method, counts)
    assert counts.accepted_tokens > 0
