"""`/metrics`: what the worker has done, as text that Prometheus reads."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldpress.server.worker import Worker

COUNTERS = {
    "sequences": "Sequences that ended.",
    "cancelled": "Sequences that ended because their client left.",
    "failed": "Sequences that ended with an error.",
    "prompt_tokens": "Tokens of prompts that were prefilled.",
    "new_tokens": "Tokens that were generated.",
    "prefills": "Prefills; prompts that begin together share one.",
    "passes": "Passes that decoded tokens, one of each running sequence.",
    "prefill_s": "Seconds of prefills.",
    "decode_s": "Seconds of passes that decoded.",
    "flash_s": "The part of the seconds in which the model waited for flash.",
    "reads": "Reads from flash.",
    "read_bytes": "Bytes read from flash.",
    "hits": "Units that decoding used and that were in DRAM.",
    "misses": "Units that decoding used and that had to be read.",
}
PREFIX_COUNTERS = {
    "restored_tokens": "Tokens of prompts that were read instead of computed.",
    "read_bytes": "Bytes of kept prompts that were read.",
    "written_bytes": "Bytes of prompts that were written.",
    "damaged": "Files of kept prompts that were damaged, and removed.",
}
UNITS = {"_s": "_seconds", "_bytes": "_bytes"}
"""Ends of our names -> Prometheus's."""


class _Numbers(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yields the present numbers."""
        waiting, running, totals = self._worker.counts()
        for name, text in COUNTERS.items():
            ends = next((name.removesuffix(end) + unit for end, unit in UNITS.items() if name.endswith(end)), name)
            yield CounterMetricFamily(f"coldpress_{ends}", text, value=getattr(totals, name))
        if prefixes := self._worker.prefixes:
            for name, text in PREFIX_COUNTERS.items():
                yield CounterMetricFamily(f"coldpress_prefix_{name}", text, value=getattr(prefixes.totals, name))
            kept_bytes = prefixes.kept_bytes()
            yield GaugeMetricFamily("coldpress_prefix_kept_bytes", "Bytes of kept prompts.", value=kept_bytes)
        budget_bytes, used_bytes = self._worker.memory()
        for name, text, value in (
            ("waiting", "Sequences that wait.", waiting),
            ("running", "Sequences that run.", running),
            ("hit_rate", "Hits over hits and misses since the start.", totals.hit_rate),
            ("dram_budget_bytes", "The DRAM budget.", budget_bytes),
            ("dram_used_bytes", "The part of the DRAM budget in use.", used_bytes),
        ):
            yield GaugeMetricFamily(f"coldpress_{name}", text, value=value)


def metrics_text(worker: Worker) -> bytes:
    """Returns the text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(worker))
    return generate_latest(registry)
