"""PromQL over the metric catalogue: an unlisted name, label or fixed value raises an error.

Rates use Grafana's `$__rate_interval`. A dashboard's variables limit each series: `$instance` all of them,
`$session` and `$tenant` those with such a label.
"""

from metrics.catalogue import BY_NAME, MEANS, Kind, Metric

STAGE = "foretick_stage_seconds"
VARIABLES = ("session", "tenant")
"""Labels that a dashboard's variables choose among, besides `instance`."""


def per_second(name: str, *by: str, **match: str) -> str:
    """A counter's increase per second, summed over all labels but `by`."""
    metric = _metric(name, "counter", by)
    return f"sum{_by(by)} (rate({name}{_selector(metric, match)}[$__rate_interval]))"


def increase(name: str, *by: str, **match: str) -> str:
    """A counter's increase over the dashboard's whole time range."""
    metric = _metric(name, "counter", by)
    return f"sum{_by(by)} (increase({name}{_selector(metric, match)}[$__range]))"


def gauge(name: str, *by: str, over: str = "max", **match: str) -> str:
    """A gauge, aggregated by `over` (max, sum, avg) over all labels but `by`."""
    metric = _metric(name, "gauge", by)
    return f"{over}{_by(by)} ({name}{_selector(metric, match)})"


def labelled(name: str, by: str, info: str, label: str) -> str:
    """A gauge summed over all but `by`, joined with a `label` of the same daemon's info metric."""
    ours = name + _selector(_metric(name, "gauge", (by,)), {})
    _metric(info, "gauge", (label,))
    return f"sum by ({by}, {label}) ({ours} * on (instance) group_left ({label}) {info})"


def quantile(name: str, q: float, *by: str, **match: str) -> str:
    """Quantile `q` of a histogram, in seconds, for each value of the labels `by`."""
    return f"histogram_quantile({q:g}, {buckets(name, 'le', *by, **match)})"


def buckets(name: str, *by: str, **match: str) -> str:
    """A histogram's observations per second, by bucket. Raises ValueError where only the mean is exported."""
    metric = _metric(name, "histogram", tuple(label for label in by if label != "le"))
    if means := set(match.get("stage", name).split("|")) & set(MEANS):
        raise ValueError(f"{name}: only the mean of {', '.join(sorted(means))} is exported")
    return f"sum{_by(by)} (rate({name}_bucket{_selector(metric, match)}[$__rate_interval]))"


def mean(name: str, *by: str, **match: str) -> str:
    """Mean of a histogram's observations, in seconds, for each value of the labels `by`."""
    selector = _selector(_metric(name, "histogram", by), match)
    total, count = (
        f"sum{_by(by)} (rate({name}_{part}{selector}[$__rate_interval]))" for part in ("sum", "count")
    )
    return f"{total} / {count}"


def _metric(name: str, kind: Kind, by: tuple[str, ...]) -> Metric:
    metric = BY_NAME[name]
    if metric.kind != kind:
        raise ValueError(f"{name} is a {metric.kind}, not a {kind}")
    for label in by:
        if label not in metric.labels:
            raise ValueError(f"{name} has no label {label}")
    return metric


def _selector(metric: Metric, match: dict[str, str]) -> str:
    wanted = dict(match)
    for label in VARIABLES:
        if label in metric.labels:
            wanted.setdefault(label, f"${label}")
    for label, pattern in wanted.items():
        allowed = metric.values.get(label)
        if label not in metric.labels or (allowed and not set(pattern.split("|")) <= set(allowed)):
            raise ValueError(f"{metric.name} has no series with {label}={pattern}")
    wanted["instance"] = "$instance"
    return "{" + ", ".join(f'{label}=~"{pattern}"' for label, pattern in wanted.items()) + "}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
