"""Steps whose states are matrices of which no column depends on another one."""
