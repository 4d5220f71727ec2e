"""`foretick top`: a daemon's sessions, queues and latencies in a terminal, read over HTTP."""
