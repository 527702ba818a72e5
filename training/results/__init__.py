"""What a run leaves: results.json, losses.csv, and the tables of a sweep."""
