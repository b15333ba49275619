"""SEAL: learn row weights with the data scheduler, keep the best share, tune anew on it."""

from jobspec.defense import SchedulerOptions, SealOptions


def selection_options(options: SealOptions) -> SchedulerOptions:
    """Options of the scheduler of the first stage.

    SEAL's v-update is the scheduler's; its model descends u * mean a + (1 - u) * mean sigma_i l_i
    with u falling from 1 ("seal" coefficients), so alignment_coefficient plays no part; v learns
    from the steps alone, without a rescoring pass. Source: SEAL, arXiv 2410.07471, as released.
    """
    return SchedulerOptions(
        form="scalar",
        coefficients="seal",
        rescore=False,
        learning_rate=options.learning_rate,
        alignment_coefficient=options.alignment_coefficient,
        alignment_rows=options.alignment_rows,
    )
