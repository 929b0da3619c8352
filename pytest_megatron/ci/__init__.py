"""CI decision table, plans, jobs and workflows."""
