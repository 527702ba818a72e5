"""Products of approximate hardware multipliers; :mod:`hoconv.approx` has the public names."""
