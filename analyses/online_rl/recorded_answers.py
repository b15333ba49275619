"""A recorded round of a language model: answers from a file, the policy from a finished job."""

from typing import Any, NamedTuple

import torch

from analyses.context import AnalysisContext, AnalysisError
from analyses.online_rl.files import read_lines
from analyses.online_rl.influence import Scores
from analyses.online_rl.recorded import score_warnings
from analyses.online_rl.spec import OnlineRLRequest
from analyses.online_rl.token_influence import score_answers
from analyses.online_rl.tokens import Answers, TokenPolicy, padded, whiten

FIELDS = ("prompt", "completion", "advantage")
SNAPSHOT_TOLERANCE = 0.05


class AnswerRound(NamedTuple):
    """What was scored; advantage_N as in the file, of a list its last token's."""

    scores: Scores
    advantage_N: list[float]
    warnings: tuple[str, ...]


def score_recorded_answers(request: OnlineRLRequest, context: AnalysisContext) -> AnswerRound:
    """Scores of the file's answers under the job's adapter. Raises AnalysisError and Stopped."""
    if context.job is None or context.load_model is None:
        raise AnalysisError(
            "a recorded round needs the file of policy, or the job of a language model", "policy"
        )
    if request.checkpoints == "all":
        raise AnalysisError("answers of a language model are scored at 'start'", "checkpoints")
    if request.target.state is not None:
        raise AnalysisError(
            "a target of state and action is for a policy file; give prompt and completion",
            "target",
        )
    rows = read_lines(context.files["buffer"], "buffer")
    model, tokenizer = context.load_model(context.job.base, context.job.bundle)
    _require_trainable(model)
    policy = TokenPolicy(model, with_value=False).eval()
    raw, advantage_N = _answers(rows, tokenizer, "buffer", policy)
    warnings = _snapshot_warnings(policy, raw, rows, request)
    answers = _whitened(raw) if request.normalize_advantage else raw
    target = None
    if request.target.kind == "action":
        assert request.target.prompt is not None
        assert request.target.completion is not None
        row = dict(zip(FIELDS, (request.target.prompt, request.target.completion, 0), strict=True))
        target, _ = _answers([row], tokenizer, "target", policy)
    elif request.holdout is not None:
        held = _answers(
            read_lines(context.files["holdout"], "holdout"), tokenizer, "holdout", policy
        )
        target = _whitened(held[0]) if request.normalize_advantage else held[0]
    context.check_stop()
    n = len(answers.ids)

    def check(done: int) -> None:
        context.progress("answers scored", done, n)
        context.check_stop()

    scores = score_answers(
        policy,
        answers,
        request.target.kind,
        target,
        reference=request.reference,
        clip_range=request.ppo.clip_range,
        vf_coef=0.0,
        check=check,
    )
    return AnswerRound(scores, advantage_N, (*warnings, *score_warnings(request, scores)))


def _answers(
    rows: list[dict[str, Any]], tokenizer: Any, param: str, policy: TokenPolicy
) -> tuple[Answers, list[float]]:
    if not rows:
        raise AnalysisError(f"the {param} has no records", param)
    tokens, starts, advantages, old = [], [], [], []
    context_length = getattr(policy.model.config, "max_position_embeddings", None)
    for number, row in enumerate(rows, start=1):
        missing = [name for name in FIELDS if name not in row]
        if missing:
            raise AnalysisError(f"{param}, line {number}: lacks {', '.join(missing)}", param)
        prompt, answer = _tokens(row, tokenizer, f"{param}, line {number}", param)
        tokens.append([*prompt, *answer])
        if isinstance(context_length, int) and len(tokens[-1]) > context_length:
            raise AnalysisError(
                f"{param}, line {number}: {len(tokens[-1])} tokens with its prompt, the model's "
                f"context holds {context_length}; shorten it",
                param,
            )
        starts.append(len(prompt))
        advantages.append(_per_token(row, "advantage", len(answer), number, param))
        logp = row.get("logp_old")
        old.append(
            None if logp is None else _per_token(row, "logp_old", len(answer), number, param)
        )
    ids, attention, mask_BT = padded(tokens, starts)
    advantage_BT = torch.zeros_like(mask_BT)
    old_BT = _log_prob(policy, ids, attention)
    for k, (start, values, logp) in enumerate(zip(starts, advantages, old, strict=True)):
        advantage_BT[k, start - 1 : start - 1 + len(values)] = torch.tensor(values)
        if logp is not None:
            old_BT[k, start - 1 : start - 1 + len(logp)] = torch.tensor(logp)
    zeros_BT = torch.zeros_like(mask_BT)
    answers = Answers(ids, attention, mask_BT, old_BT, zeros_BT, advantage_BT, zeros_BT)
    return answers, [values[-1] for values in advantages]


def _tokens(
    row: dict[str, Any], tokenizer: Any, where: str, param: str
) -> tuple[list[int], list[int]]:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise AnalysisError(f"{where}: prompt and completion are texts", param)
    text = prompt
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    before = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    answer = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if not before or not answer:
        raise AnalysisError(f"{where}: prompt or completion has no token", param)
    return before, answer


def _per_token(row: dict[str, Any], name: str, count: int, number: int, param: str) -> list[float]:
    """A value per answer token; one number stands for all."""
    value = row[name]
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise AnalysisError(
            f"{param}, line {number}: {name} has {len(values)} values, the completion {count} "
            "tokens under this model's tokenizer",
            param,
        )
    try:
        numbers = [float(x) for x in values]
    except (TypeError, ValueError) as error:
        raise AnalysisError(f"{param}, line {number}: {name} is no number", param) from error
    if not all(x - x == 0 for x in numbers):
        raise AnalysisError(f"{param}, line {number}: {name} is not a finite number", param)
    return numbers


def _whitened(answers: Answers) -> Answers:
    return answers._replace(advantages_BT=whiten(answers.advantages_BT, answers.mask_BT))


def _log_prob(policy: TokenPolicy, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        parts = [policy(ids[k : k + 8], attention[k : k + 8])[0] for k in range(0, len(ids), 8)]
    return torch.cat(parts)


def _require_trainable(model: Any) -> None:
    """The adapter's matrices carry the scores; loaders may hand it over frozen."""
    found = False
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)
            found = True
        else:
            parameter.requires_grad_(False)
    if not found:
        raise AnalysisError("the job has no LoRA adapter, so its answers cannot be scored")


def _snapshot_warnings(
    policy: TokenPolicy, answers: Answers, rows: list[dict[str, Any]], request: OnlineRLRequest
) -> list[str]:
    warnings = []
    if all(row.get("logp_old") is None for row in rows):
        warnings.append(
            "No logp_old in the buffer: the job's adapter is taken as the policy that sampled it."
        )
    else:
        now = _log_prob(policy, answers.ids, answers.attention)
        off = float(((now - answers.old_log_prob_BT) * answers.mask_BT).abs().max())
        if off > SNAPSHOT_TOLERANCE:
            warnings.append(
                f"logp_old differs from the job's adapter's by up to {off:.3g} nats a token: it "
                "may not be the policy from before the update."
            )
    return warnings
