"""What a run does, by `mode`: train, test, predict, export."""
