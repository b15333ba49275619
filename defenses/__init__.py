"""Defences against harmful fine-tuning: pure torch, no database, no network, no environment."""
