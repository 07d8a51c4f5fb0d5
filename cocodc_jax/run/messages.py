"""Error messages of programs."""

import re
from collections.abc import Container


def one_line(error: Exception | str, flags: Container[str]) -> str:
    """Return what to print of an error: on one line, and with the flag as it is typed.

    Args:
      error: a message, which begins with an argument's name and `=`, if it is of one.
      flags: names of the program's flags; an argument of such a name is the flag.

    >>> one_line(ValueError("steps=0 must be at least 1"), ["steps"])
    '--steps=0 must be at least 1'
    """
    line = " ".join(str(error).split())
    name = re.match(r"[a-z_0-9]+(?==)", line)
    return f"--{line}" if name and name[0] in flags else line
