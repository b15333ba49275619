"""The demo: one poisoned training file, tuned plainly and tuned defended, through the gateway."""
