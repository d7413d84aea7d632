"""The part of an engine's Prometheus page that operators and gates read; names and kinds as SGLang 0.5.23 has them."""

from __future__ import annotations

from collections import Counter
from typing import Final

KV_MB_BUCKETS: Final = (1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
ENGINE_TYPE: Final = {"null": "unified", "prefill": "prefill", "decode": "decode"}


class Metrics:
    """Counts since the start of the process. Gauges are given when the page is written."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.transfers = 0
        self.transferred_mb = 0.0
        self._buckets: Counter[int] = Counter()

    def transferred(self, size: int) -> None:
        """Count one KV transfer of `size` bytes."""
        megabytes = size / (1024 * 1024)
        self.transfers += 1
        self.transferred_mb += megabytes
        self._buckets.update(limit for limit in KV_MB_BUCKETS if megabytes <= limit)

    def page(self, model: str, mode: str, running: int, waiting: int) -> str:
        """Return the page. running, waiting: requests at work, and requests that wait for the other side of a pair."""
        kind = ENGINE_TYPE[mode]
        label = f'engine_type="{kind}",is_streaming="false",model_name="{model}"'
        rank = f'engine_type="{kind}",model_name="{model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        lines: list[str] = []

        def simple(name: str, metric_type: str, labels: str, value: float) -> None:
            lines.extend([f"# TYPE {name} {metric_type}", f"{name}{{{labels}}} {value}"])

        simple("sglang:num_running_reqs", "gauge", rank, float(running))
        simple("sglang:num_queue_reqs", "gauge", rank, 0.0)
        simple("sglang:num_requests_total", "counter", label, float(self.requests))
        simple("sglang:prompt_tokens_total", "counter", label, float(self.prompt_tokens))
        simple("sglang:generation_tokens_total", "counter", label, float(self.generation_tokens))
        if mode == "prefill":
            simple("sglang:num_prefill_inflight_queue_reqs", "gauge", rank, float(waiting))
            name = "sglang:kv_transfer_total_mb"
            lines.append(f"# TYPE {name} histogram")
        if self.transfers:  # until the first one a histogram has no samples
            counts = {f"{limit}.0": self._buckets[limit] for limit in KV_MB_BUCKETS} | {"+Inf": self.transfers}
            lines += [f'{name}_bucket{{{rank},le="{limit}"}} {float(count)}' for limit, count in counts.items()]
            lines += [
                f"{name}_count{{{rank}}} {float(self.transfers)}",
                f"{name}_sum{{{rank}}} {self.transferred_mb}",
            ]
        if mode == "decode":
            simple("sglang:num_decode_transfer_queue_reqs", "gauge", rank, float(waiting))
        return "\n".join(lines) + "\n"
