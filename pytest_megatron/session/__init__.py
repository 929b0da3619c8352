"""A pytest session: its options, its state, the files that it leaves."""
