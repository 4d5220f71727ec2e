"""Grafana dashboards as code: expressions follow from the metric catalogue; the JSON is committed."""
