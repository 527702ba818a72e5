"""Where multipliers without a kernel come from: files of tables, functions in C and in Python."""
