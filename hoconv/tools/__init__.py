"""The command ``hoconv``: new, check, test, benchmark, report, doctor, build."""
