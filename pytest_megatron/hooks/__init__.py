"""pytest's side: options, session, markers, fixtures."""
