"""Real fleets under kills, pauses and lost servers; each occurrence is counted from outside."""
