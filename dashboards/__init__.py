"""Grafana dashboards as code: expressions come from the metric catalogue, JSON is committed beside them."""
