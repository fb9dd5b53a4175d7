"""WHEN: the times of a schedule; pure, time is an argument."""
