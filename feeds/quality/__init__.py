"""Whether a feed tells the truth: silence, calendars, and faults to test it with."""
