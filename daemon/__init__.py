"""The composition root: processes, configuration, command line, sockets."""
