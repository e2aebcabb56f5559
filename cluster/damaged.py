"""Files that may say anything at all: whatever their readers trip over becomes one error that names the file."""

from collections.abc import Generator
from contextlib import contextmanager

from .errors import ModelLoadError

MISTAKES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What values of wrong types, sizes and names make a reader raise."""
_SHOWN = 300


@contextmanager
def reading(what: object) -> Generator[None, None, None]:
    """Raises ModelLoadError, with ``what`` in front, for any of ``MISTAKES`` inside; other errors pass."""
    try:
        yield
    except MISTAKES as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ModelLoadError(f"{what}: cannot be read: {name}{error}"[:_SHOWN]) from error
