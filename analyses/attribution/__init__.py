"""Which training rows pushed a model toward a behaviour."""
