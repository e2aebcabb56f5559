"""One model cut over several processes: two ranks share every layer, and nothing else changes.

    python examples/parallel.py

On a machine with two GPUs each rank has one; without any, each has its share of the cores.
"""

import warmroot

PROMPTS = ["The capital of France is", "Two plus two is"]


def main() -> None:
    with warmroot.LLM("smollm2", tensor_parallel_size=2) as llm:
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, warmroot.SamplingParams(max_tokens=8)), strict=True):
            print(f"{prompt}{output.text}")


if __name__ == "__main__":
    main()
