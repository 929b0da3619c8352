"""Stands in for gettext's envsubst: `envsubst [SHELL-FORMAT]` copies stdin, variables filled in.

With an argument only the variables that it refers to are filled in. Standard library only.
"""

from __future__ import annotations

import os
import re
import sys

_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def main() -> None:
    """Copy stdin to stdout with variables replaced."""
    names = None
    if len(sys.argv) > 1:
        names = {a or b for a, b in _REFERENCE.findall(sys.argv[1])}

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return match[0] if names is not None and name not in names else os.environ.get(name, "")

    sys.stdout.write(_REFERENCE.sub(value_of, sys.stdin.read()))


if __name__ == "__main__":
    main()
