"""The top package: processes, configuration, command line, sockets."""
