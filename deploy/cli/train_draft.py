"""``warmroot train-draft MODEL --layers N --output DIR``: a small model that drafts for a large one."""

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .training_flags import training_parser

if TYPE_CHECKING:
    from .training import Training


def main(argv: Sequence[str]) -> int:
    """Train. Progress goes to stderr, the figures as JSON to stdout."""
    parser = training_parser("train-draft", "Train a drafting model of a few of a model's layers, by what it writes.")
    parser.add_argument("--layers", type=int, default=2, help="of the draft; it starts from as many of the model's")
    parser.add_argument("--batch-size", type=int, default=8, help="texts per step (default: 8)")
    options = parser.read(argv)
    from .training import run  # not before it is needed: it imports torch

    return run(options, lambda training: _train(training, options))


def _train(training: "Training", options: Namespace) -> dict[str, Any]:
    from ...actors.quantize.checkpoint import write_tokenizer
    from ...actors.training.draft import DraftTask, draft_acceptance, start_draft, write_draft
    from ...actors.training.draft_net import LayerChoice, check_layers

    spec = training.decoder.spec
    check_layers(spec)
    layers = LayerChoice.spread(options.layers, spec.num_layers)
    lessons = training.lessons()
    net = start_draft(training.path, layers, lessons.vocabulary)
    trainer = training.train(
        net, DraftTask(net, lessons.train, lessons.train_features, lessons.vocabulary), options.batch_size
    )
    figures = draft_acceptance(DraftTask(net, lessons.held_out, lessons.held_out_features, lessons.vocabulary))
    write_draft(options.output, net, lessons.vocabulary)
    write_tokenizer(training.path, options.output)
    training.finish(trainer, lessons, figures)
    return figures
