"""The error of a user's command or configuration."""


class MisconfigurationException(Exception):
    """A command or its configuration asks for what cannot be; says what to write instead.

    It has the name of Lightning's own, whose import takes seconds: a command is checked before.
    """
