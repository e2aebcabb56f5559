"""An actor of your own that uses the model: a handle inside a Ray program.

Start ``warmroot serve smollm2 --num-replicas 2``, then on the same machine:

    python examples/ray_actor.py
"""

import asyncio

import ray

import warmroot

REVIEWS = [
    "The soup was cold and the waiter was rude.",
    "What a wonderful evening, we will come back!",
    "Fine food, but the music was far too loud.",
]


@ray.remote(num_cpus=0)
class Summarizer:
    """Asynchronous methods share one handle, and the replicas batch what they ask."""

    def __init__(self) -> None:
        self.handle = warmroot.connect()
        self.params = warmroot.SamplingParams(max_tokens=24, temperature=0)

    async def summarize(self, text: str) -> str:
        messages = [
            {"role": "system", "content": "Summarize the review in five words."},
            {"role": "user", "content": text},
        ]
        return (await self.handle.generate(messages, self.params)).text

    async def first_words(self, text: str, count: int) -> str:
        """Leaving the loop aborts the request and frees its memory."""
        words = ""
        async for delta in self.handle.stream(text):
            words += delta.text
            if len(words.split()) > count:
                break
        return " ".join(words.split()[:count])


async def main() -> None:
    # Joins the server's Ray, which listens on loopback only: ray.init would look for it at the machine's address.
    warmroot.connect().close()
    summarizer = Summarizer.remote()
    summaries = await asyncio.gather(*[summarizer.summarize.remote(review) for review in REVIEWS])
    for review, summary in zip(REVIEWS, summaries, strict=True):
        print(f"{review}\n  {summary}")
    print("Once upon a time", await summarizer.first_words.remote("Once upon a time", 5))


if __name__ == "__main__":
    asyncio.run(main())
