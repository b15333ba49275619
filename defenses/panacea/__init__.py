"""Panacea: a bounded adapter perturbation, prepared during tuning and added afterwards."""
