"""Pure measurements of a language model: harmfulness, refusal, diversity, utility, and the gate.

Importing this package imports neither torch nor transformers; each module says what it needs.
"""
