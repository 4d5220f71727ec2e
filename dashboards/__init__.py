"""Grafana dashboards as code: expressions come from the metric catalogue, the JSON is committed with them."""
