"""The front process: feeds in, answers out, sessions, offsets."""
