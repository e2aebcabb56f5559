"""What a section of the configuration is, and the types of keys that several sections have."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from .sizes import parse_size


def _several(value: Any) -> Any:
    """A lone value stands for a list of one; YAML's lists become tuples."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _absolute(path: str) -> str:
    """Whatever folder the process that opens it works in; stderr is no file."""
    return path if path == "stderr" else os.path.abspath(path)


FilePath = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]
"""A file's name as this process understands it."""
Bytes = Annotated[int, BeforeValidator(parse_size)]
"""A size in bytes; texts such as ``2GiB`` or ``512MB`` are accepted."""
Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_several)]


class Section(BaseModel):
    """Strict types, no unknown keys, no changes after validation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    def problem(self) -> tuple[str, str] | None:
        """(key, message) of keys that contradict each other, or None."""
        return None
