"""What an attacker can learn from a model that was tuned with differential privacy."""
