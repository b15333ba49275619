"""The service's own sets that the defenses lean on, tokenised for the base model of a job."""

import torch

from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.spec import JobSpec
from workers.pipeline.align import packaged, read_pairs
from workers.pipeline.models import LoadedModel
from workers.pipeline.rows import TokenRow

LEAST_BATCHES = 50


def alignment_rows(
    spec: JobSpec, base: LoadedModel, user_rows: int, hyper: ResolvedHyperparameters
) -> list[TokenRow]:
    """D_safe: M rows of the shipped alignment set, half refusals, half harmless answers.

    M = min(max(N, 50 batches), the option's cap), so that a small file does not get a defense of
    a handful of rows.
    """
    options = spec.defense.scheduler
    if options.name == "none":
        return []
    wanted = min(max(user_rows, LEAST_BATCHES * hyper.batch_size), options.alignment_rows)
    limit = spec.model.lora.max_length
    refusals = read_pairs(packaged("alignment_refusals.jsonl"), base.tokenizer, limit)
    harmless = read_pairs(packaged("alignment_harmless.jsonl"), base.tokenizer, limit)
    mixed = [row for pair in zip(_shuffled(refusals, spec.seed), _shuffled(harmless, spec.seed),
                                 strict=False) for row in pair]  # fmt: skip
    return mixed[:wanted]


def harmful_rows(spec: JobSpec, base: LoadedModel) -> list[TokenRow]:
    """D_h of the perturbation: requests with empty compliant answers, never shown to tenants."""
    if spec.defense.perturbation.mode == "none":
        return []
    limit = spec.model.lora.max_length
    return read_pairs(packaged("harmful_compliances.jsonl"), base.tokenizer, limit)


def _shuffled(rows: list[TokenRow], seed: int) -> list[TokenRow]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[index] for index in order]
