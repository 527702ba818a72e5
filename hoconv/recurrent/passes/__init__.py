"""The passes of the compiler: functions from a program to a program, one in each file."""
