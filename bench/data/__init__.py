"""Fresh answers under load and after an outage."""
