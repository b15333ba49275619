"""Local data attribution for PPO, and influence-based filtering of rollouts."""
