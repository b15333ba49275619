"""The attack bench: poisoned sets against named defenses, on a toy world and on real models."""
