"""Which form of output a request asks for, in OpenAI's words and in vLLM's."""

from typing import Any, Literal, NamedTuple

from pydantic import Field

from ...cluster.errors import InvalidRequestError
from ...cluster.output_grammar import OutputGrammar
from .bodies import RequestBody

JSON_OBJECT = OutputGrammar.json_schema({"type": "object"})


class AskedGrammar(NamedTuple):
    """A grammar, and the path of the field that asks for it."""

    grammar: OutputGrammar
    path: str


class JsonSchemaFormat(RequestBody):
    """A JSON schema with a name."""

    name: str = Field(min_length=1, max_length=64)
    """What the schema describes."""
    description: str | None = None
    """Accepted and not used."""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema; without it, any object."""
    strict: bool | None = None
    """Accepted: the output always keeps to the schema."""


class ResponseFormat(RequestBody):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    """``text``, ``json_object`` (any object) or ``json_schema``."""
    json_schema: JsonSchemaFormat | None = None
    """With ``json_schema``."""

    def grammar(self, path: str) -> AskedGrammar | None:
        """What it asks for; ``path`` is that of this field. Raises InvalidRequestError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return AskedGrammar(JSON_OBJECT, path)
        if self.json_schema is None:
            raise InvalidRequestError("json_schema is missing", param=f"{path}.json_schema")
        return _schema_grammar(self.json_schema.schema_, f"{path}.json_schema.schema")


class StructuredOutputs(RequestBody):
    """vLLM's ``structured_outputs``: one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: list[str] | None = Field(None, min_length=1)
    """The output is one of these."""
    grammar: str | None = None
    """A context-free grammar in GBNF or Lark."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | None = None
    """Not supported."""

    def asked(self, path: str) -> list[AskedGrammar]:
        """What it asks for; ``path`` is that of this field. Raises InvalidRequestError."""
        if self.structural_tag is not None:
            reason = "structural_tag is not supported by this server"
            raise InvalidRequestError(reason, param=f"{path}.structural_tag")
        found = guided(self.json_, self.regex, self.choice, self.grammar, f"{path}.")
        return [*found, AskedGrammar(JSON_OBJECT, f"{path}.json_object")] if self.json_object else found


def guided(
    schema: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> list[AskedGrammar]:
    """What fields such as ``{prefix}json`` ask for. Raises InvalidRequestError for a choice that is empty."""
    found: list[AskedGrammar] = []
    if schema is not None:
        found.append(_schema_grammar(schema, f"{prefix}json"))
    if regex is not None:
        found.append(AskedGrammar(OutputGrammar("regex", regex), f"{prefix}regex"))
    if choice is not None:
        if not choice or "" in choice:
            raise InvalidRequestError("choice must have texts, none of them empty", param=f"{prefix}choice")
        found.append(AskedGrammar(OutputGrammar.choice(choice), f"{prefix}choice"))
    if grammar is not None:
        found.append(AskedGrammar(OutputGrammar("grammar", grammar), f"{prefix}grammar"))
    return found


def only_one(asked: list[AskedGrammar]) -> AskedGrammar | None:
    """Raises InvalidRequestError where fields contradict each other."""
    if len(asked) > 1:
        reason = f"{asked[0].path} and {asked[1].path} exclude each other: an output has one form"
        raise InvalidRequestError(reason, param=asked[1].path)
    return asked[0] if asked else None


def _schema_grammar(schema: str | dict[str, Any] | None, path: str) -> AskedGrammar:
    if schema is None:
        return AskedGrammar(JSON_OBJECT, path)
    if isinstance(schema, str):
        return AskedGrammar(OutputGrammar("json_schema", schema), path)
    return AskedGrammar(OutputGrammar.json_schema(schema), path)
