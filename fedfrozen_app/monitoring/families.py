"""Every family of metrics by name, and those that a site's policy allows to show.

A site's metrics go through `Collected`, which accepts no other name, so nothing else can be shown by
accident.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

HEALTH, ACTIVITY = "health", "activity"
ALLOWED = {"none": (), "health": (HEALTH,), "activity": (HEALTH, ACTIVITY)}  # by `monitoring` of a policy


@dataclass(frozen=True)
class Family:
    text: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"
    level: str = HEALTH


def counter(text: str, *labels: str, level: str = HEALTH) -> Family:
    return Family(text, labels, "counter", level)


def gauge(text: str, *labels: str, level: str = HEALTH) -> Family:
    return Family(text, labels, "gauge", level)


def work(text: str, *labels: str) -> Family:
    """A gauge about a site's activity, not only its health."""
    return gauge(text, *labels, level=ACTIVITY)


def works(text: str, *labels: str) -> Family:
    return counter(text, *labels, level=ACTIVITY)


MACHINE: dict[str, Family] = {
    "fedfrozen_disk_free_bytes": gauge("Free on the disk of this folder.", "folder"),
    "fedfrozen_disk_size_bytes": gauge("Size of the disk of this folder.", "folder"),
    "fedfrozen_memory_available_bytes": gauge("Memory that processes can still get."),
    "fedfrozen_memory_size_bytes": gauge("Memory of the machine."),
    "fedfrozen_gpu_memory_used_bytes": gauge("Memory in use on a GPU.", "gpu"),
    "fedfrozen_gpu_memory_size_bytes": gauge("Memory of a GPU.", "gpu"),
    "fedfrozen_gpu_busy_ratio": gauge("Share of the last moments in which a GPU computed.", "gpu"),
    "fedfrozen_certificate_seconds": gauge("Until the certificate of this party ends.", "holder"),
}
SITE: dict[str, Family] = MACHINE | {
    "fedfrozen_site_up": gauge("Whether this part of the site runs (1) or not (0).", "part"),
    "fedfrozen_site_stalled_seconds": gauge("For how long a running part has hung.", "part"),
    "fedfrozen_site_server_silence_seconds": gauge("Since the server last answered the SuperNode."),
    "fedfrozen_site_clock_offset_seconds": gauge("This machine's clock minus the server's."),
    "fedfrozen_site_link_delay_seconds": gauge("For the last, smallest request to the server."),
    "fedfrozen_site_link_bytes_per_second": gauge("Of the last large piece of a message.", "way"),
    "fedfrozen_site_waiting_approvals": gauge("Proposals about which a person has yet to decide."),
    "fedfrozen_site_oldest_approval_seconds": gauge("For how long the oldest of them has waited."),
    "fedfrozen_site_version_refused": gauge(
        "Whether the server's last request came from a version that the policy does not allow."
    ),
    "fedfrozen_site_record_sound": gauge("Whether audit log and budget record are whole (1) or not (0)."),
    "fedfrozen_site_in_hand": gauge("Messages of the server in work: 0 or 1."),
    "fedfrozen_site_rounds": works("Rounds for which an update was sent."),
    "fedfrozen_site_replies": works("Replies by state. Refusals and failures count as one.", "state"),
    "fedfrozen_site_bytes": works("Bytes of messages since the SuperNode began.", "way"),
    "fedfrozen_site_seconds": works("Seconds that the executor spent, in tens.", "phase"),
    "fedfrozen_site_examples": work("Rows told to the server with the last update; none below the floor."),
    "fedfrozen_site_epsilon_spent": work("Epsilon of all runs."),
    "fedfrozen_site_epsilon_left": work("Epsilon that the policy still gives."),
    "fedfrozen_site_epsilon_limit": work("max_epsilon of the policy."),
    "fedfrozen_site_delta_left": work("Delta that the policy still gives."),
}
SERVER: dict[str, Family] = MACHINE | {
    "fedfrozen_server_up": gauge("Whether this part of the server answers (1) or not (0).", "part"),
    "fedfrozen_server_runs": gauge("Runs that the SuperLink has not finished.", "state"),
    "fedfrozen_server_site_online": gauge("Whether the SuperLink counts the site as connected.", "site"),
    "fedfrozen_server_site_silence_seconds": gauge("Since the site's last heartbeat.", "site"),
    "fedfrozen_run_alive": gauge("Whether the run's process is there (1) or lost (0).", "run"),
    "fedfrozen_run_round": gauge("The last finished round.", "run"),
    "fedfrozen_run_rounds": gauge("Rounds that the run will have.", "run"),
    "fedfrozen_run_last_round_timestamp_seconds": gauge("When the last round was written.", "run"),
    "fedfrozen_run_seconds": counter("Seconds of all rounds.", "run", "phase"),
    "fedfrozen_run_bytes": counter("Bytes of all rounds, all sites together.", "run", "way"),
    "fedfrozen_run_replies": counter("Replies of all rounds.", "run", "state"),
    "fedfrozen_run_last_replies": gauge("Replies of the last round.", "run", "state"),
    "fedfrozen_run_discarded_rounds": counter("Rounds that changed nothing.", "run"),
    "fedfrozen_run_site": gauge("1 for the state in which the run sees the site.", "run", "site", "state"),
}


@dataclass
class Collected:
    """The samples of one scrape."""

    families: Mapping[str, Family]
    levels: tuple[str, ...] = (HEALTH, ACTIVITY)
    _samples: dict[str, list[tuple[tuple[str, ...], float]]] = field(default_factory=dict)

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Add a sample; None means unknown and is left out. `KeyError` for undeclared names."""
        family = self.families[name]
        values = tuple(labels[label] for label in family.labels)
        if value is not None and family.level in self.levels:
            self._samples.setdefault(name, []).append((values, float(value)))

    def metrics(self) -> Iterator[Metric]:
        for name, samples in self._samples.items():
            family = self.families[name]
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = make(name, family.text, labels=family.labels)
            for labels, value in samples:
                metric.add_metric(labels, value)
            yield metric
