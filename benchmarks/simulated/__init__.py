"""A cluster that is not there: nodes, a queue and a clock, behind the commands of a scheduler."""
