"""The laboratory: planning, profiling, simulation and theory. Nothing that runs in production imports it."""
