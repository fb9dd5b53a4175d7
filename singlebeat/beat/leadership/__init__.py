"""WHO LEADS: the lease of the leader, its watchdog, and the guard against clocks that go back."""
