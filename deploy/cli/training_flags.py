"""Flags that ``train-medusa`` and ``train-draft`` share."""

import os
from pathlib import Path

from .flags import Parser


def training_parser(command: str, description: str) -> Parser:
    """MODEL, what to learn from, and for how long."""
    parser = Parser(f"warmroot {command}", description)
    add = parser.add_argument
    add("model", help="folder, GGUF file, hub id or smollm2")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write; one that was begun is gone on with")
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="a text to learn from, or JSON lines with a text or with a prompt that the model answers (default: the"
        " model writes prompts and answers of its own)",
    )
    add("--tokens", type=int, default=600_000, metavar="N", help="of text to learn from (default: 600000)")
    add("--minutes", type=float, default=25.0, metavar="M", help="longest time for the training itself (default: 25)")
    add("--epochs", type=float, default=8.0, help="times that every text is seen at most (default: 8)")
    add("--vocabulary", type=int, default=8192, help="tokens that are drafted: the most frequent ones (default: 8192)")
    add("--learning-rate", type=float, default=1e-3, help="highest (default: 0.001)")
    add("--streams", type=int, default=128, help="texts that the model writes at a time (default: 128)")
    add("--max-tokens", type=int, default=320, help="of the longest answer (default: 320)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    add("--seed", type=int, default=0, help="of texts and batches")
    return parser
