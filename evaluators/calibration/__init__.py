"""Whether a judge or reward model agrees with people who do not all agree."""
