"""How many examples hypothesis draws, and whether they are the same each time."""

import os

from hypothesis import HealthCheck, settings

VARIABLE = "WARMROOT_FUZZ_EXAMPLES"


def examples(count: int) -> settings:
    """For a test: so many, always the same; or as many as the variable says, drawn anew."""
    return settings(
        max_examples=int(os.environ.get(VARIABLE, count)),
        deadline=None,
        derandomize=VARIABLE not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
