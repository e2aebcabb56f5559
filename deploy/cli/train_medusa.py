"""``warmroot train-medusa MODEL --output DIR``: heads that guess several tokens ahead of a model."""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .training_flags import training_parser

if TYPE_CHECKING:
    from .training import Training


def main(argv: Sequence[str]) -> int:
    """Train. Progress goes to stderr, the figures as JSON to stdout."""
    parser = training_parser("train-medusa", "Train Medusa heads for a model, by what the model itself writes.")
    parser.add_argument("--heads", type=int, default=4, help="tokens that are guessed at a time (default: 4)")
    parser.add_argument("--batch-size", type=int, default=1024, help="places in a text per step (default: 1024)")
    options = parser.read(argv)
    from .training import run  # not before it is needed: it imports torch

    return run(options, lambda training: _train(training, options))


def _train(training: "Training", options: Namespace) -> dict[str, Any]:
    from ...actors.training.medusa_heads import MedusaHeads, MedusaTask, head_accuracy, write_heads
    from ...actors.training.model_parts import head_rows

    lessons = training.lessons()
    heads = MedusaHeads(head_rows(training.path, lessons.vocabulary.token_map), options.heads)
    task = MedusaTask(heads, lessons.train_features, lessons.vocabulary)
    trainer = training.train(heads, task, options.batch_size)
    figures = head_accuracy(MedusaTask(heads, lessons.held_out_features, lessons.vocabulary))
    write_heads(options.output, heads, lessons.vocabulary)
    training.finish(trainer, lessons, figures)
    return figures
