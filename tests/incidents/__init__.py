"""What the tools say in incidents, with real beats, workers and servers."""
