"""Files that runs and sweeps leave: results.json, growing CSV tables, sweep.json."""
