"""One verdict of many CI jobs."""
