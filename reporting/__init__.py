"""What a run tells: results.json, losses.csv, the loggers, and what the terminal shows."""
