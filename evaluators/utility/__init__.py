"""Whether a tuned model learned its task."""
