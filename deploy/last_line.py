"""What Ray's and Serve's messages, long as they are, come down to."""

from collections.abc import Sequence


def last_line(messages: Sequence[str]) -> str:
    """The last line of the last message that has one: there stands what went wrong."""
    for message in reversed(messages):
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return "no reason given"
