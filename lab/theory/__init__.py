"""The theory of prefix-reuse scheduling (*k-LPM*): its model, orders, hard instances and guarantees."""
