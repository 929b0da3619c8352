"""Traces of a training: what each module and each parameter computes, step by step."""
