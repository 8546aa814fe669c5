"""Checking protocols under the simulator: cases, search, mutants, counterexamples in words, the table of the docs."""
