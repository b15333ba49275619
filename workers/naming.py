"""Names of checkpoints, in OpenAI's form."""

from service.models.naming import model_name


def checkpoint_name(base: str, organization: str, suffix: str | None, step: int) -> str:
    """A checkpoint's name; its 8 characters are its own, not those of the final model."""
    return f"{model_name(base, organization, suffix)}:ckpt-step-{step}"
