"""What the clients ask for: a pool of requests of every kind, drawn from a seed, so that each has one right answer."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("river", "stone", "cloud", "lamp", "green", "seven", "walk", "under", "bright", "paper", "north", "glass")
TOPICS = ("the sea", "old maps", "bread", "a long winter", "trains", "the number seven")
NUM_TENANTS = 2
ANSWER_TOKENS = (12, 40)
"""Fewest and most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``body`` has neither ``stream`` nor ``model``; it says everything that the answer depends on."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    stream: bool
    leave_after: int | None = None
    """Events after which the client leaves."""
    tenant: int = 0


class AskPool:
    """Draws requests. Prompts begin with one of a few prefixes, a popular one most often."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._prefixes = [" ".join(self._draw.choices(WORDS, k=90)) for _ in range(4)]

    def take(self, count: int) -> list[Ask]:
        """So many, of all kinds in turn; every other one is streamed."""
        kinds = self._kinds()
        return [self._ask(number, *kinds[number % len(kinds)]) for number in range(count)]

    def _ask(self, number: int, kind: str, fields: Callable[[], dict[str, Any]]) -> Ask:
        chat = self._draw.random() < 0.4
        body = {"max_tokens": self._draw.randint(*ANSWER_TOKENS), "return_token_ids": True, **fields()}
        if chat and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        body |= self._conversation() if chat else {"prompt": self._prompt()}
        leaves = kind == "leaves"
        return Ask(
            number=number,
            kind=kind,
            path=CHAT if chat else COMPLETIONS,
            body=body,
            stream=leaves or self._draw.random() < 0.6,
            leave_after=self._draw.randint(1, 8) if leaves else None,
            tenant=self._draw.randrange(NUM_TENANTS),
        )

    def _kinds(self) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
        """Name and fields of each kind."""
        seed = self._draw.randrange
        return [
            ("greedy", lambda: {"temperature": 0}),
            ("sampled", lambda: {"temperature": 0.8, "top_p": 0.95, "seed": seed(2**31)}),
            ("penalties", lambda: {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.3}),
            ("leaves", lambda: {"temperature": 0, "ignore_eos": True}),
            ("logprobs", lambda: {"temperature": 0.7, "seed": seed(2**31), "logprobs": 3}),
            ("stops", lambda: {"temperature": 0, "stop": self._draw.sample([" the", ".", "\n", " and", ","], 2)}),
            ("two", lambda: {"temperature": 0.9, "top_k": 40, "seed": seed(2**31), "n": 2}),
            ("minimum", lambda: {"temperature": 0.6, "seed": seed(2**31), "min_tokens": 10, "repetition_penalty": 1.1}),
        ]

    def _prompt(self) -> str:
        prefix = self._prefixes[min(int(self._draw.expovariate(1.0)), len(self._prefixes) - 1)]
        return f"{prefix}. {' '.join(self._draw.choices(WORDS, k=6))} tells of {self._draw.choice(TOPICS)}:"

    def _conversation(self) -> dict[str, Any]:
        system = {"role": "system", "content": self._prefixes[self._draw.randrange(2)]}
        question = f"Say something about {self._draw.choice(TOPICS)} and {' '.join(self._draw.choices(WORDS, k=4))}."
        return {"messages": [system, {"role": "user", "content": question}]}
