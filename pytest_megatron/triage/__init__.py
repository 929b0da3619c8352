"""Root causes of failures, from logs and records."""
