"""Traces of a training: what each module and parameter computes, step by step."""
