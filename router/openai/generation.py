"""One generation request of either API: from prompts in token ids to a stream or to whole choices."""

import json
import math
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace

from fastapi import Request
from starlette.responses import Response

from ...cluster.errors import InvalidRequestError
from ...cluster.ids import RequestId
from ...cluster.sampling_params import SamplingParams
from ..frontend import Frontend
from ..metrics import RequestMeter
from ..output import OutputCollector, RequestOutput
from ..tenancy.rate_limits import UNSAID_OUTPUT_TOKENS
from .chunks import ChunkOptions, Envelope, UsageCounter
from .events import EventStream, EventWriter
from .feed import DeltaFeed
from .logprobs import LogprobFormat
from .protocol import GenerationRequest
from .record import RequestRecord, principal_of
from .service import Service

SESSION_HEADERS = ("x-session-id", "x-dynamo-session-id", "x-smg-routing-key")
"""Ours is Ray Serve's, too; then Dynamo's and SGLang's."""
_LONGEST_SESSION = 256
TIMEOUT_HEADERS = {
    "x-request-timeout-seconds": 1.0,
    "x-litellm-timeout": 1.0,
    "request-timeout-ms": 1e-3,
    "x-envoy-expected-rq-timeout-ms": 1e-3,
}
"""With the seconds of their unit: Ray Serve's, LiteLLM's, that of OpenAI's SDK, and what Envoy adds by itself."""
EXPLAIN_HEADER = "x-warmroot-explain"
_MOST_SHOWN = 8
"""Candidates in a header, which proxies allow a few kilobytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All that is known before the first token."""

    service: Service
    frontend: Frontend
    request: Request
    body: GenerationRequest
    envelope: Envelope
    prompts: list[list[int]]
    params: SamplingParams
    usage: UsageCounter
    engine_id: str
    """Beginning of its ids in the engines: unique, whatever id the client chose."""

    @classmethod
    def of(
        cls,
        service: Service,
        name: str,
        frontend: Frontend,
        request: Request,
        body: GenerationRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        id_prefix: str,
    ) -> "Generation":
        """The generation that ``body`` asks for, of the model that tokenized it, under the id of its HTTP request."""
        if body.request_id is not None and "x-request-id" not in request.headers:
            request.state.request_id = body.request_id
        envelope = Envelope(
            id=f"{id_prefix}-{request.state.request_id}",
            created=int(service.clock()),
            model=name,
            fingerprint=service.fingerprint,
        )
        usage = UsageCounter(sum(map(len, prompts)))
        request.state.record.model, request.state.record.usage = name, usage.usage
        return cls(
            service=service,
            frontend=frontend,
            request=request,
            body=body,
            envelope=envelope,
            prompts=prompts,
            params=params,
            usage=usage,
            engine_id=f"{envelope.id}-{service.new_id()[:8]}",
        )

    @property
    def logprob_format(self) -> LogprobFormat:
        """How to write log-probabilities."""
        return LogprobFormat(self.frontend.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    def chunk_options(self) -> ChunkOptions:
        """What a stream carries beside its text."""
        options = self.body.stream_options
        include_usage = options is not None and options.include_usage
        return ChunkOptions(
            include_usage=include_usage,
            continuous_usage=options is not None and include_usage and options.continuous_usage_stats,
            token_ids=bool(self.body.return_token_ids),
            logprobs=None if self.params.logprobs is None else self.logprob_format,
        )

    async def stream(self, writer: EventWriter) -> Response:
        """The response, as soon as the first delta is here. Raises what refuses the request before that.

        While it waits for the first replica, which may take minutes to start, the client gets keep-alives instead.
        """
        await self._reserve(self.params)
        feed = self._start(self.params)
        try:
            first = await feed.next()
            while not (first or feed.done) and self.service.has_replica(self.frontend.model):
                first = await feed.next()
        except BaseException:
            await feed.aclose()
            raise
        delta = first[0].delta if first else None
        headers = {} if delta is None else self.headers(delta.replica, delta.cached_tokens, delta.weights_version)
        return EventStream(feed, writer, first, headers, self.request.state.request_id)

    async def outputs(self) -> list[RequestOutput] | None:
        """The whole output of each prompt; None when the client has left.

        With ``best_of`` all candidates count in the usage, and the ``n`` likeliest are returned.
        """
        params = self._params_of_candidates()
        await self._reserve(params)
        collectors = [OutputCollector(params.n) for _ in self.prompts]
        async with aclosing(self._start(params)) as feed:
            while not feed.done:
                for arrival in await feed.next():
                    self.usage.count(arrival)
                    collectors[arrival.prompt].add(arrival.delta)
            if feed.disconnected:
                return None
        return [
            collector.finish(RequestId(self.envelope.id), prompt, self.params.n)
            for collector, prompt in zip(collectors, self.prompts, strict=True)
        ]

    def headers(
        self, replica: str | None, cached_tokens: int | None, weights_version: str | None = None
    ) -> dict[str, str]:
        """Which replica answered, how much of the prompt it had cached and, where the request asks, why it did."""
        self.request.state.record.replica = replica or ""
        headers = {"x-warmroot-replica": replica or "", "x-warmroot-cached-tokens": str(cached_tokens or 0)}
        if weights_version is not None:
            headers["x-warmroot-weights-version"] = weights_version
        if self.request.headers.get(EXPLAIN_HEADER, "0").lower() not in {"0", "false"}:
            for choice in self.service.cluster.explain(f"{self.engine_id}-"):
                shown = asdict(replace(choice, candidates=choice.candidates[:_MOST_SHOWN]))
                headers["x-warmroot-routing"] = json.dumps(shown, separators=(",", ":"))
        return headers

    def _params_of_candidates(self) -> SamplingParams:
        params = self.params
        if params.best_of is None or params.best_of == params.n:
            return params
        return replace(params, n=params.best_of, best_of=None, logprobs=params.logprobs or 0)

    async def _reserve(self, params: SamplingParams) -> None:
        """Take what it may use from the limits of its key. Raises RateLimitError."""
        quota = self.request.state.record.quota
        if quota is not None:
            most = UNSAID_OUTPUT_TOKENS if params.max_tokens is None else params.max_tokens
            await quota.reserve(self.usage.prompt_tokens + most * params.n * len(self.prompts))

    def _start(self, params: SamplingParams) -> DeltaFeed:
        """Submit every prompt."""
        service, principal = self.service, principal_of(self.request.scope)
        record: RequestRecord = self.request.state.record
        streams = [
            self.frontend.stream(
                prompt,
                params,
                request_id=RequestId(f"{self.engine_id}-{number}"),
                priority=principal.priority(self.body.priority),
                cache_salt=principal.cache_salt(self.body.cache_salt),
                session_id=principal.session(session_of(self.request.headers) or self.body.session_id or ""),
                tenant=principal.tenant,
                share=principal.share,
                timeout_s=timeout_of(self.request.headers, self.body.timeout),
                admitted=number > 0,
                company_tokens=0 if number else sum(map(len, self.prompts[1:])),
                trace=record.trace,
            )
            for number, prompt in enumerate(self.prompts)
        ]
        meters = [RequestMeter(service.metrics, self.frontend.model, service.monotonic, params) for _ in streams]
        record.meters = meters
        feed = DeltaFeed(streams, meters, self.request.receive, service.settings.keep_alive_s)
        feed.start()
        return feed


def timeout_of(headers: Mapping[str, str], timeout_s: float | None) -> float | None:
    """Seconds that the client, and every gateway before it, gives the request: the least of what they say.

    0 and less say nothing, as in Ray Serve. Raises InvalidRequestError for a header that is no number.
    """
    limits = [] if timeout_s is None else [timeout_s]
    for name, unit_s in TIMEOUT_HEADERS.items():
        text = headers.get(name)
        if text is None:
            continue
        try:
            limit = float(text) * unit_s
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            raise InvalidRequestError(f"{name} must be a number, not {text[:40]!r}", param=name)
        if limit > 0:
            limits.append(limit)
    return min(limits, default=None)


def session_of(headers: Mapping[str, str]) -> str | None:
    """The session that a request's headers name; what is too long to be one is none."""
    named = (headers.get(name) for name in SESSION_HEADERS)
    return next((session for session in named if session and len(session) <= _LONGEST_SESSION), None)
