"""Passes, memory, snapshots and restarts of the model's process."""

from dashboards.expressions import STAGE, gauge, mean, per_second
from dashboards.panels import Rows, counters, gauges, rates, series


def rows() -> Rows:
    """Work, memory, and what outlives the process."""
    return {"Passes": _passes(), "Memory": _memory(), "Snapshots and restarts": _snapshots()}


def _passes() -> list[object]:
    return [
        series("Up", "none", (gauge("foretick_engine_up", over="min"), "up")),
        series("Utilisation", "percentunit", (gauge("foretick_utilisation_ratio"), "utilisation")),
        series("Mean forward pass", "s", (mean(STAGE, stage="forward"), "mean")),
        series("Passes a second", "short", (per_second("foretick_batches_total"), "passes")),
        rates("Tokens a second, by class", "foretick_batch_tokens_total", "class"),
        rates("Passes out of memory, a second", "foretick_oom_total", "outcome"),
        rates(
            "Sizes of passes captured as CUDA graphs, a second", "foretick_graph_captures_total", "outcome"
        ),
    ]


def _memory() -> list[object]:
    used = gauge("foretick_pool_blocks", over="sum", state="used")
    total = gauge("foretick_pool_blocks", over="sum", state="free|used")
    capacity = [
        (gauge("foretick_sessions_open", over="sum"), "open"),
        (gauge("foretick_sessions_capacity", "limit"), "{{limit}}"),
    ]
    return [
        series("KV pool in use", "percentunit", (f"{used} / {total}", "used")),
        gauges("KV blocks of the host tier", "short", "foretick_host_blocks", "state", over="sum"),
        series("Sessions open, and capacity by limit", "short", *capacity),
        series(
            "Questions that each session could have", "short", (gauge("foretick_k_max", over="min"), "k_max")
        ),
        rates("Sessions that leave the pool a second, by where to", "foretick_spills_total", "outcome"),
        rates("Sessions restored a second, by where from", "foretick_restores_total", "outcome"),
        rates("Prefix cache, tokens a second", "foretick_prefix_tokens_total", "event"),
        counters("Idle sessions not written or read, a second", failed="foretick_spill_failures_total"),
    ]


def _snapshots() -> list[object]:
    failed = [
        (per_second("foretick_snapshot_write_failures_total", "reason"), "not written: {{reason}}"),
        (per_second("foretick_snapshots_refused_total", "reason"), "not used: {{reason}}"),
    ]
    free = gauge("foretick_snapshot_disk_free_ratio", over="min"), "free"
    return [
        gauges("Age of the newest snapshot", "s", "foretick_snapshot_age_seconds", "session"),
        rates("Snapshots written a second", "foretick_snapshots_written_total", "session"),
        series("Snapshots that failed, a second", "short", *failed),
        series("Disk of snapshots, free", "percentunit", free),
        rates("Sessions from a snapshot, a second", "foretick_snapshots_restored_total", "session"),
        counters("Engine restarts a second", restarts="foretick_engine_restarts_total"),
    ]
