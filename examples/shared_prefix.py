"""A batch of questions about one document, offline: the document is computed once.

python examples/shared_prefix.py
"""

import warmroot

DOCUMENT = """The Rhine rises in the Swiss Alps, leaves Lake Constance at its western end, and falls at Schaffhausen
over the largest waterfall of the European plain. From Basel on it is navigable; it passes Strasbourg, Mainz, Koblenz,
Cologne and Rotterdam, and reaches the North Sea after 1,233 kilometres. Barges carry ore, coal, oil and containers."""
QUESTIONS = [
    "Where does the Rhine rise?",
    "How long is the Rhine?",
    "From which city on is it navigable?",
    "What do barges carry?",
]


def main() -> None:
    prompts = [f"{DOCUMENT}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    params = warmroot.SamplingParams(max_tokens=24, temperature=0, stop=("\n",))
    with warmroot.LLM("smollm2") as llm:
        outputs = llm.generate(prompts, params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}{output.text}")
        print(f"  [{output.cached_tokens} of {output.num_prompt_tokens} prompt tokens cached]")


if __name__ == "__main__":
    main()
