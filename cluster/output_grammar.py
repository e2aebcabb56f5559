"""What an output must look like: a value that travels with a request's sampling parameters."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]


class OutputGrammar(NamedTuple):
    """A language that the whole output belongs to. A tuple, as msgpack carries them."""

    kind: GrammarKind
    """``json_schema``, ``regex`` (all of the output matches), ``choice`` (one of some texts), ``grammar`` (GBNF or
    Lark, whichever it looks like) or ``lark``."""
    text: str
    """The schema or the list of texts as JSON, the expression, or the grammar."""

    @classmethod
    def json_schema(cls, schema: Any) -> "OutputGrammar":
        """JSON that a schema describes; the order of properties is that of the schema."""
        return cls("json_schema", json.dumps(schema, separators=(",", ":")))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "OutputGrammar":
        """One of the texts."""
        return cls("choice", json.dumps(list(texts)))
