"""Fuzzes one reader of bytes with atheris, guided by the coverage of our code; ``fuzz.py`` runs it."""

import sys
from random import Random

import atheris

MOST_BYTES = 64 * 1024


def main() -> None:
    """``guided.py TARGET SEED CORPUS libFuzzer's own flags``"""
    name, seed, *flags = sys.argv[1:]
    with atheris.instrument_imports(include=["warmroot", "src.warmroot"], enable_loader_override=False):
        from fuzz_targets import TARGETS

    target = TARGETS[name]
    trees = [tree for tree in target.seeds() if not isinstance(tree, bytes)]

    def mutate(data: bytes, most: int, number: int) -> bytes:
        """Half of all inputs are trees that were changed where bytes would only break their syntax."""
        rng = Random(number)
        if trees and rng.random() < 0.5:
            return target.mutated(rng, rng.choice(trees))[:most]
        return atheris.Mutate(data, most)

    atheris.Setup(
        [sys.argv[0], f"-seed={seed}", f"-max_len={MOST_BYTES}", "-print_final_stats=1", *flags],
        target.check,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
