"""The judge that an operator's options name, ready to judge."""

import os
from collections.abc import Mapping

from evaluators.harmfulness.contract import HarmJudge
from evaluators.harmfulness.scorer import EmbeddedScorer
from jobspec.judging import EmbeddedJudge, GuardJudge, JudgeOptions


def load_judge(
    options: JudgeOptions,
    scorer: EmbeddedScorer,
    *,
    environment: Mapping[str, str] | None = None,
) -> HarmJudge:
    """The judge of these options; `scorer` serves where they name the embedded one.

    `environment` holds the API key of a moderation service under the name that the options give;
    None: this process's environment. Raises what the judge's loading raises: UnknownPresetError,
    GuardUnavailableError, GuardMismatchError, ScorerDamagedError.
    """
    if isinstance(options, EmbeddedJudge):
        return scorer.with_tail_rule(options.tail_rule)
    if isinstance(options, GuardJudge):
        from evaluators.guards.load import load_guard

        return load_guard(
            options.preset,
            model=options.model,
            threshold=options.threshold,
            batch_size=options.batch_size,
            device=options.device,
        )
    from evaluators.guards.moderation import ModerationClient

    keys = os.environ if environment is None else environment
    return ModerationClient(options, keys.get(options.api_key_variable))
