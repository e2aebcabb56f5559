"""The endpoint through OpenAI's own Python client (``pip install openai``): a whole answer, then a stream.

Start ``warmroot serve smollm2``, then anywhere:

    python examples/openai_client.py [http://127.0.0.1:8000]
"""

import os
import sys

from openai import OpenAI

MESSAGES = [{"role": "user", "content": "Name three colours."}]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("WARMROOT_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("WARMROOT_API_KEY", "none"))
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32)
    print(answer.choices[0].message.content)
    print(
        f"  [{answer.usage.prompt_tokens_details.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens cached]"
    )

    for chunk in client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=32, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
