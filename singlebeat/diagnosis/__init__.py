"""What operators are told: the facts about an entry, the locks, the workers, and the findings of ``doctor``."""
