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
    parser.add_argument(
        "--recurrent",
        action="store_true",
        help="one head that reads what it guesses, token by token, instead of Medusa's: better guesses",
    )
    parser.add_argument("--inner-size", type=int, default=1536, help="of the recurrent head (default: 1536)")
    options = parser.read(argv)
    from .training import run  # not before it is needed: it imports torch

    return run(options, lambda training: _train(training, options))


def _train(training: "Training", options: Namespace) -> dict[str, Any]:
    return _train_recurrent(training, options) if options.recurrent else _train_medusa(training, options)


def _train_medusa(training: "Training", options: Namespace) -> dict[str, Any]:
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


def _train_recurrent(training: "Training", options: Namespace) -> dict[str, Any]:
    from ...actors.training.model_parts import embedding_table, head_rows
    from ...actors.training.recurrent_head import RecurrentHead, RecurrentTask, write_recurrent_head

    lessons = training.lessons()
    words = lessons.vocabulary
    head = RecurrentHead(head_rows(training.path, words.token_map), embedding_table(training.path), options.inner_size)
    task = RecurrentTask.of(head, lessons.train, lessons.train_features, words, options.heads)
    trainer = training.train(head, task, options.batch_size)
    figures = RecurrentTask.of(head, lessons.held_out, lessons.held_out_features, words, options.heads).accuracy()
    write_recurrent_head(options.output, head, words)
    training.finish(trainer, lessons, figures)
    return figures
