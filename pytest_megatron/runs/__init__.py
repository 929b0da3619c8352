"""Run directories: layout, records, archives, redaction, history."""
