"""Whether a grammar can be had, found out before the request goes anywhere, on threads of its own."""

import asyncio
import json
import re
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from ...cluster.errors import InvalidRequestError
from ...cluster.output_grammar import OutputGrammar
from ...cluster.request_limits import RequestLimits
from ...cluster.sampling_params import SamplingParams
from ..grammar_library import fault_of
from .output_format import AskedGrammar

_MOST_REMEMBERED = 256
_THREADS = 2
_UNKNOWN = "Unimplemented keys: "
"""How the library begins when it names keywords, in quotes, without their place."""
_QUOTED = re.compile(r'"([^"]+)"')
_NAMES = (".properties", ".patternProperties", ".$defs", ".definitions")
"""What holds schemas by names of their own."""
_MOST_LEVELS = 64
"""Of a schema's JSON: every library that reads it calls itself once or more for each."""


class _Fault(NamedTuple):
    reason: str
    """Empty: there is none."""
    where: str = ""
    """In a schema, such as ``.properties.age``."""


class GrammarChecks:
    """Remembers what it found of the latest grammars."""

    def __init__(self) -> None:
        self._faults: OrderedDict[OutputGrammar, _Fault] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="warmroot-grammar-check")

    async def applied(
        self, params: SamplingParams, asked: AskedGrammar | None, limits: RequestLimits
    ) -> SamplingParams:
        """``params`` with what is asked for. Raises InvalidRequestError naming the part at fault."""
        return params if asked is None else replace(params, grammar=await self.check(asked, limits))

    async def check(self, asked: AskedGrammar, limits: RequestLimits) -> OutputGrammar:
        """The grammar. Raises InvalidRequestError naming the part at fault."""
        grammar, path = asked
        if len(grammar.text) > limits.max_grammar_chars:
            most = f"the {limits.max_grammar_chars} that this server takes (max_grammar_chars)"
            raise InvalidRequestError(f"{path}: {len(grammar.text)} characters is more than {most}", param=path)
        fault = self._faults.get(grammar)
        if fault is None:
            loop = asyncio.get_running_loop()
            fault = await loop.run_in_executor(self._threads, _fault, grammar, limits)
            self._faults[grammar] = fault
            if len(self._faults) > _MOST_REMEMBERED:
                self._faults.popitem(last=False)
        if fault.reason:
            where = path + fault.where
            raise InvalidRequestError(f"{where}: {fault.reason}", param=where)
        return grammar


def _fault(grammar: OutputGrammar, limits: RequestLimits) -> _Fault:
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            return _Fault(f"is not JSON: {error}")
        fault = _schema_fault(schema, limits)
        if fault.reason:
            return fault
        reason = fault_of(grammar)
        return _Fault(reason, _place(schema, set(_QUOTED.findall(reason))) if reason.startswith(_UNKNOWN) else "")
    return _Fault(fault_of(grammar))


def _place(schema: Any, keywords: set[str]) -> str:
    """The path of the outermost of these keywords in a schema."""
    waiting = deque([("", schema)])
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, dict) and not path.endswith(_NAMES) and (found := keywords & value.keys()):
            return f"{path}.{min(found)}"
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        waiting += [(f"{path}.{step}", inner) for step, inner in items]
    return ""


def _schema_fault(schema: Any, limits: RequestLimits) -> _Fault:
    """What is no JSON schema, and where, or goes beyond a limit."""
    from jsonschema.validators import Draft202012Validator, validator_for

    if _levels(schema) > _MOST_LEVELS:
        return _Fault(f"more than {_MOST_LEVELS} levels of JSON are not taken")
    if (values := _count(schema)) > limits.max_schema_values:
        most = f"the {limits.max_schema_values} that this server takes (max_schema_values)"
        return _Fault(f"{values} values are more than {most}")
    kind = validator_for(schema, default=Draft202012Validator)
    errors = kind(kind.META_SCHEMA).iter_errors(schema)
    error = next(iter(sorted(errors, key=lambda error: len(error.absolute_path))), None)
    if error is None:
        return _Fault("")
    return _Fault(error.message[:300], "".join(f".{step}" for step in error.absolute_path))


def _inner(value: Any) -> list[Any]:
    """What is directly in a JSON value."""
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


def _levels(value: Any) -> int:
    """How deep a JSON value is, as far as that matters."""
    row, levels = [value], 0
    while row and levels <= _MOST_LEVELS:
        row, levels = [inner for outer in row for inner in _inner(outer)], levels + 1
    return levels


def _count(value: Any) -> int:
    """Values in it, itself included."""
    waiting, count = [value], 0
    while waiting:
        waiting += _inner(waiting.pop())
        count += 1
    return count
