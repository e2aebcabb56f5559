"""A conversation through a client handle, without HTTP: every turn finds the ones before it in some replica's cache.

Start ``warmroot serve smollm2 --num-replicas 2``, then on the same machine:

    python examples/chat.py
"""

import warmroot

QUESTIONS = ["Who was Ada Lovelace?", "What did she write?", "Why does it matter today?"]


def main() -> None:
    params = warmroot.SamplingParams(max_tokens=48, temperature=0)
    messages = [{"role": "system", "content": "You are a friendly teacher who answers in one or two short sentences."}]
    with warmroot.connect() as handle:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = handle.generate_sync(messages, params)
            messages.append({"role": "assistant", "content": answer.text})
            print(f"> {question}\n{answer.text}")
            print(
                f"  [{answer.cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached in {answer.replica}]\n"
            )


if __name__ == "__main__":
    main()
