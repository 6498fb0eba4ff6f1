"""What happens in the gateway, for Prometheus: vLLM's names (docs.vllm.ai, "Metrics") with the prefix ``swarmd_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from swarmd.gateway.generation.row import RowReport

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 8, 32, 128, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 131_072)


class Metrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._of_keys = CollectorRegistry()  # which no key is told of
        self.running = self._gauge("num_requests_running", "Requests being generated.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait for a turn.")
        self.kept = self._gauge("num_sessions_kept", "Sessions that wait for a next turn.", "model_name")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated = self._counter("generation_tokens", "Tokens generated.")
        # vLLM's prefix cache is a kept session here: its tokens are the hits, and all tokens of prompts the queries.
        self.queries = self._counter("prefix_cache_queries", "Tokens of prompts that a session was looked for.")
        self.hits = self._counter("prefix_cache_hits", "Tokens of prompts that such a session had.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens tried ahead.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Tokens tried ahead that were right.")
        self.void = self._counter("void_windows", "Windows of tried tokens that became void under way.")
        self.served_logits = self._counter(
            "tokens_with_given_logits", "Tokens, tried ones too, whose logits a server gave."
        )
        self.repairs = self._counter("repairs", "Repairs of a chain during an answer.")
        self.ended = self._counter("request_success", "Answers, by how they ended.", "finished_reason")
        self.refused = Counter("swarmd_request_refused", "Refusals.", ["status"], registry=self._registry)
        self.by_key = Counter(
            "swarmd_key_tokens", "Tokens of prompts and answers, by API key.", ["key_name"], registry=self._of_keys
        )
        self.first = self._histogram("time_to_first_token_seconds", "Until the first token.", SECONDS)
        self.between = self._histogram("inter_token_latency_seconds", "Between two tokens.", SECONDS)
        self.total = self._histogram("e2e_request_latency_seconds", "Of a whole answer.", SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", "Waiting for a turn.", SECONDS)
        self.prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answers = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"swarmd_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"swarmd_{name}", text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"swarmd_{name}", text, ["model_name"], registry=self._registry, buckets=buckets)

    def count_answer(self, model: str, report: RowReport, finish: str, key: str) -> None:
        """Count an answer of a key ("" for none): it ended by "stop", "length", "tool_calls", "abort" or "error"."""
        self.by_key.labels(key).inc(report.n_prompt + report.n_generated)
        self.ended.labels(model, finish).inc()
        self.prompt.labels(model).inc(report.n_prompt)
        self.generated.labels(model).inc(report.n_generated)
        self.queries.labels(model).inc(report.n_prompt)
        self.hits.labels(model).inc(report.n_cached)
        self.drafted.labels(model).inc(report.n_drafted)
        self.accepted.labels(model).inc(report.n_accepted)
        self.void.labels(model).inc(report.n_void)
        self.served_logits.labels(model).inc(report.n_logits)
        self.repairs.labels(model).inc(len(report.repairs))
        self.prompts.labels(model).observe(report.n_prompt)
        self.answers.labels(model).observe(report.n_generated)
        self.queued.labels(model).observe(report.queued_s)
        if report.n_generated:
            self.first.labels(model).observe(report.queued_s + report.prefilled_s)
            self.total.labels(model).observe(report.queued_s + report.total_s)
        if report.n_generated > 1:
            decode_s = report.total_s - report.prefilled_s
            self.between.labels(model).observe(decode_s / (report.n_generated - 1))

    def text(self, with_keys: bool) -> bytes:
        """Write all of it as Prometheus reads it."""
        return generate_latest(self._registry) + (generate_latest(self._of_keys) if with_keys else b"")
