"""Where attempts run: this machine, a container, a cluster. Knows no verdicts and no pytest."""
