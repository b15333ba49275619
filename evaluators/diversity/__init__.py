"""How far a model's answers to open questions collapse onto one another."""
