"""Benchmarks that need an accelerator; `make bench` leaves them out."""
