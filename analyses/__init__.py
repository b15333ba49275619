"""Questions about a job or its data, answered by published methods. One folder per family; each
kind has a spec (pydantic, light) and a method (pure functions over arrays and models)."""
