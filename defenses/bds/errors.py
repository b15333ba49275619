"""What can go wrong with a scheduler, one class for each thing a caller can act on."""


class RowIdError(ValueError):
    """A batch names a row the scheduler does not know, or does not match its losses."""


class NonFiniteLossError(ValueError):
    """A response loss is NaN or infinite; one such value would spoil the logits of all rows."""

    def __init__(self, row_ids: list[int]) -> None:
        self.row_ids = row_ids
        super().__init__(
            f"rows {row_ids} have a loss that is not finite; skip this step for the model and the "
            "scheduler alike, or lower the learning rate"
        )


class SchedulerStateError(ValueError):
    """A saved state or scorer belongs to another set, tokenizer, transform or sampler."""
