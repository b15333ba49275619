"""Bayesian Data Scheduler: one safety weight per training row, learned while the model tunes."""
