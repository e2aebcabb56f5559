"""Seeded workloads: what is asked of an engine, the same for every contender."""

import itertools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .peers.protocol import Job

Encode = Callable[[str], list[int]]

_SUBJECTS = (
    "the harbour master", "a careful reader", "our committee", "the younger engineer", "her grandmother",
    "the night train", "an old survey map", "the city archive", "a flock of starlings",
    "the second experiment", "the village baker", "the report", "his neighbour", "a small satellite",
    "the orchestra", "the river",
)  # fmt: skip
_VERBS = (
    "described", "measured", "carried", "questioned", "repaired", "followed", "translated", "counted",
    "painted", "forgot", "improved", "borrowed", "noticed", "explained", "delayed", "protected",
)  # fmt: skip
_OBJECTS = (
    "the broken clock", "seven barrels of salt", "a letter from Lisbon", "the results of last winter",
    "an unusual pattern in the data", "the road across the marsh", "two languages at once",
    "a garden behind the mill", "the price of copper", "every lighthouse on the coast",
    "a recipe for rye bread", "the shortest proof", "three missing pages", "the colour of the evening sky",
    "a loan without interest", "the habits of wild bees",
)  # fmt: skip
_TAILS = (
    "before the rain came", "although nobody had asked", "with more patience than skill",
    "for the third time this year", "because the bridge was closed", "while the others slept",
    "without changing a word", "as the law requires", "in a quiet voice", "at the end of a long table",
    "when the market opened", "to everyone's surprise",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Tokens, both ends included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """A uniform draw."""
        return rng.randint(self.low, self.high)


PROMPT_TOKENS = LengthRange(128, 512)
OUTPUT_TOKENS = LengthRange(64, 128)


def sentences(rng: random.Random) -> Iterator[str]:
    """English that a tokenizer splits as it splits any prose; streams differ from their first token on."""
    name = "".join(rng.choices(string.ascii_lowercase, k=8)).capitalize()
    yield f"{name}, page {rng.randrange(10**6)}."
    while True:
        parts = (rng.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS, _TAILS))
        yield " " + " ".join(parts).capitalize() + rng.choice((".", ".", ";", f", in {rng.randint(1790, 2020)}."))


class Workloads:
    """Draws workloads with the model's tokenizer; equal seeds give equal workloads."""

    def __init__(self, encode: Encode, seed: int) -> None:
        self._encode = encode
        self._rng = random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        """Exactly ``num_tokens`` token ids of new text."""
        tokens: list[int] = []
        text = sentences(self._rng)
        while len(tokens) < num_tokens:
            tokens += self._encode("".join(itertools.islice(text, 16)))
        return tokens[:num_tokens]

    def distinct(
        self, count: int, prompt: LengthRange = PROMPT_TOKENS, output: LengthRange = OUTPUT_TOKENS
    ) -> list[Job]:
        """Requests that share nothing: no prefix cache can help."""
        return [Job(self.prompt(prompt.draw(self._rng)), output.draw(self._rng)) for _ in range(count)]

    def shared_prefix(self, count: int, prefix_tokens: int, suffix: LengthRange, output: LengthRange) -> list[Job]:
        """Requests that begin with the same ``prefix_tokens`` tokens and go on differently."""
        prefix = self.prompt(prefix_tokens)
        return [Job(prefix + self.prompt(suffix.draw(self._rng)), output.draw(self._rng)) for _ in range(count)]

    def many_prefixes(
        self, num_prefixes: int, per_prefix: int, prefix: LengthRange, suffix: LengthRange, output: LengthRange
    ) -> list[Job]:
        """``per_prefix`` requests on each of several prefixes, in random order."""
        jobs: list[Job] = []
        for _ in range(num_prefixes):
            jobs += self.shared_prefix(per_prefix, prefix.draw(self._rng), suffix, output)
        self._rng.shuffle(jobs)
        return jobs

    def chats(
        self,
        num_systems: int,
        per_system: int,
        turns: int,
        system: LengthRange,
        message: LengthRange,
        output: LengthRange,
    ) -> list[Job]:
        """``per_system`` requests on each system prompt, in sessions of ``turns`` that take turns at random.

        A prompt repeats what came before it in its session; prose stands for the answers, as long as they are.
        """
        waiting: list[Iterator[Job]] = []
        for _ in range(num_systems):
            prompt = self.prompt(system.draw(self._rng))
            waiting += [self._session(prompt, turns, message, output) for _ in range(per_system // turns)]
        order = [session for session in waiting for _ in range(turns)]
        self._rng.shuffle(order)
        return [next(session) for session in order]

    def _session(self, prompt: list[int], turns: int, message: LengthRange, output: LengthRange) -> Iterator[Job]:
        for _ in range(turns):
            prompt = prompt + self.prompt(message.draw(self._rng))
            job = Job(prompt, output.draw(self._rng))
            yield job
            prompt = prompt + self.prompt(job.max_tokens)

    def arrivals(self, count: int, per_second: float) -> list[float]:
        """Seconds at which ``count`` requests of a Poisson process come."""
        return list(itertools.accumulate(self._rng.expovariate(per_second) for _ in range(count)))


def prefill_only(jobs: list[Job]) -> list[Job]:
    """The same prompts with one output token each."""
    return [Job(job.prompt, 1) for job in jobs]
