"""HTML pages and charts of finished runs."""
