"""The page that says what an operator's kernels buy: ``hoconv report OPERATOR [PATH ...]``."""
