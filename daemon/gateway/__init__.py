"""The gateway process: feeds in, answers out, sessions, offsets."""
