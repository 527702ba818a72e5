"""Names with a parameter, such as ``mbm:keep=9``."""

from __future__ import annotations

import re


def value_of(text: str, parameter: str, allowed: range, default: int) -> int | None:
    """Returns the value of a name's parameter, of ``"name"`` the default one; None where the text
    names another parameter or gives no allowed value."""
    _, colon, setting = text.partition(":")
    if not colon:
        return default
    given, _, number = setting.partition("=")
    value = int(number) if given == parameter and re.fullmatch(r"\d{1,3}", number) else None
    return value if value in allowed else None
