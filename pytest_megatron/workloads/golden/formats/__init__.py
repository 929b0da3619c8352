"""Golden file formats and metric sources."""
