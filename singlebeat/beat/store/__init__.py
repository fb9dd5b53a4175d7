"""WHERE: the schedule in Redis: due entries, claims, quarantine, history."""
