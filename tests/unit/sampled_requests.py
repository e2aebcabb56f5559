"""Requests with every kind of sampling parameter, for models with a vocabulary of 16 and more."""

from typing import Any

PROMPT = [5, 9, 7, 11, 5, 9, 7, 11, 5, 9]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.4},
    "filters": {"top_p": 0.8, "top_k": 6, "min_p": 0.05, "temperature": 0.7},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.5, "logit_bias": {5: 3.0, 9: 2.0}, "frequency_penalty": 0.1},
    "allowed": {"temperature": 0.6, "allowed_token_ids": (5, 7, 9, 11, 2)},
    "bad": {"temperature": 0.0, "bad_words_token_ids": ((5, 9), (7,))},
    "stop": {"temperature": 0.5, "ignore_eos": False, "stop_token_ids": (11,), "min_tokens": 9, "max_tokens": 60},
    "logprobs": {"temperature": 0.3, "logprobs": 2, "prompt_logprobs": 1},
}


def requests_with(params: dict[str, dict[str, Any]]) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """(prompt, parameters) by name, each with a seed of its own."""
    return {
        name: ([*PROMPT, seed + 3], {"max_tokens": 40, "ignore_eos": True, "seed": seed} | own)
        for seed, (name, own) in enumerate(params.items())
    }
