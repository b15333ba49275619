"""Judges other than the embedded scorer: guard models, and services that moderate text."""
