"""The controller's side of all gangs: supervisor, connections, rank collectors."""
