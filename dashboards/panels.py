"""Panels of the dashboards, and the dashboard that rows of them become."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import heatmap as heatmaps
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from dashboards.expressions import STAGE, gauge, per_second, quantile

HALF, THIRD, SIXTH = 12, 8, 4
"""Widths; a row of Grafana's is 24 wide."""
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_VARIABLES = {
    "instance": "label_values(foretick_engine_up, instance)",
    "session": 'label_values(foretick_data_version{instance=~"$instance"}, session)',
    "tenant": 'label_values(foretick_tenant_requests_total{instance=~"$instance"}, tenant)',
}

Query = tuple[str, str]
"""A PromQL expression and the legend of its series."""
Panel = Any
"""A panel's builder: the SDK has no type that they share."""
Rows = Mapping[str, Sequence[Panel]]
"""Panels by the title of their row."""


@dataclass(frozen=True)
class Board:
    """A dashboard. ``name``: of its file, and behind `foretick-` of its uid. ``reader``: what it is for."""

    name: str
    reader: str
    rows: Callable[[], Rows]

    @property
    def uid(self) -> str:
        """The dashboard's id in Grafana."""
        return f"foretick-{self.name}"

    def build(self) -> str:
        """The dashboard as Grafana's JSON: always the same bytes, ending in one newline."""
        dashboard = (
            Dashboard(f"Foretick: {self.name}")
            .uid(self.uid)
            .description(self.reader)
            .tags(["foretick"])
            .refresh("5s")
            .time("now-15m", "now")
            .timezone("browser")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .link(_others())
            .with_variable(DatasourceVariable("datasource").type("prometheus").label("Data source"))
        )
        for name, query in _VARIABLES.items():
            dashboard = dashboard.with_variable(_variable(name, query))
        number = count(1)
        for title, panels in self.rows().items():
            dashboard = dashboard.with_row(Row(title).id(next(number)))
            for panel in panels:
                dashboard = dashboard.with_panel(panel.id(next(number)))
        text: str = JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build())
        return text + "\n"


def series(title: str, unit: str, *targets: Query, span: int = THIRD) -> Panel:
    """Lines over time."""
    legend = (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = timeseries.Panel().title(title).datasource(_SOURCE).unit(unit).height(8).span(span).legend(legend)
    for index, (expression, label) in enumerate(targets):
        panel = panel.with_target(_query(expression, label, index))
    return panel


def rates(title: str, counter: str, by: str) -> Panel:
    """A counter's increase per second, one line per value of the label ``by``."""
    return series(title, "short", (per_second(counter, by), f"{{{{{by}}}}}"))


def counters(title: str, **named: str) -> Panel:
    """Counters' increases per second, a line each, by legend."""
    return series(title, "short", *((per_second(counter), legend) for legend, counter in named.items()))


def gauges(title: str, unit: str, name: str, by: str, over: str = "max") -> Panel:
    """A gauge, one line per value of the label ``by``."""
    return series(title, unit, (gauge(name, by, over=over), f"{{{{{by}}}}}"))


def stage_quantiles(stages: str) -> list[Query]:
    """Median, p90 and p99 of stages, such as `queue_flash|forward`."""
    return [
        (quantile(STAGE, q, "stage", stage=stages), f"p{q * 100:g} {{{{stage}}}}") for q in (0.5, 0.9, 0.99)
    ]


def stacked(panel: Panel) -> Panel:
    """The lines of a panel on top of each other."""
    return panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)


def heatmap(title: str, description: str, buckets: str) -> Panel:
    """A histogram over time, in seconds."""
    return (
        heatmaps.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .y_axis(heatmaps.YAxisConfig().unit("s"))
        .height(9)
        .span(HALF)
        .with_target(_query(buckets, "{{le}}", 0).format("heatmap"))
    )


def stat(
    title: str, unit: str, expression: str, bad_from: float | None = None, bad_below: float | None = None
) -> Panel:
    """One number; red from ``bad_from`` on, or below ``bad_below``."""
    steps = [Threshold(color="green")]
    if bad_from is not None:
        steps = [Threshold(color="green"), Threshold(value=bad_from, color="red")]
    if bad_below is not None:
        steps = [Threshold(color="red"), Threshold(value=bad_below, color="green")]
    return (
        stats.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .height(4)
        .span(SIXTH)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_query(expression, "", 0))
    )


def _others() -> DashboardLink:
    return (
        DashboardLink("Foretick")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["foretick"])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _variable(name: str, query: str) -> Any:
    return (
        QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _query(expression: str, legend: str, index: int) -> Any:
    return (
        Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index)).datasource(_SOURCE)
    )
