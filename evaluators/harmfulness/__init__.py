"""How often a model answers a harmful request, and how often it refuses a harmless one."""
