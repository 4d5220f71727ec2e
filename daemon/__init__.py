"""The daemon: processes, configuration, command line, sockets."""
