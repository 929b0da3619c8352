"""Source of facts: this machine and this environment, or staged ones in a test."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemView:
    """Everything that a probe looks at.

    Attributes:
        python: The interpreter of the environment.
        project: The directory that trainings are started in.
        root: What `/proc`, `/sys`, `/dev`, `/run` and `/usr` are below.
        env: Variables; its `PATH` is where programs are looked for.
        home: For caches that no variable names.
        temporary: The directory for temporary files.
        wheel_host: Host and port where projects publish wheels.
        rendezvous_port: The port that launchers take by default.
        import_limit_s: Time limit for torch and its extensions to be imported; a fifth of it for
            each extension.
        collective_limit_s: Time limit for one all_reduce with all that it starts.
    """

    python: Path
    project: Path = field(default_factory=Path.cwd)
    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    home: Path = field(default_factory=Path.home)
    temporary: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    wheel_host: tuple[str, int] = ("github.com", 443)
    rendezvous_port: int = 29500
    import_limit_s: float = 300.0
    collective_limit_s: float = 120.0

    def under(self, path: str) -> Path:
        """Return an absolute path of the machine that is looked at."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str:
        """Return a file of the machine, empty where there is none."""
        try:
            return self.under(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def here(python: Path | None = None) -> SystemView:
    """Return this machine, and the environment of `python`; by default the one that runs this."""
    return SystemView(python=python or Path(sys.executable))
