"""Request and result of attribution.online_rl."""

from typing import Literal, Self

from pydantic import Field, model_validator

from analyses.kind import Cost, Kind
from jobspec.frozen import Frozen

Task = Literal["frozen_lake", "cart_pole", "acrobot"]
TargetKind = Literal["action", "return", "sequence"]
Reference = Literal["buffer", "leave_one_out", "holdout"]
Checkpoints = Literal["start", "all"]
ArmName = Literal["ppo", "iif", "iif_leave_one_out", "iif_all", "random", "random_all"]

PAPER = (
    "A Snapshot of Influence: A Local Data Attribution Framework for Online Reinforcement Learning "
    "(NeurIPS 2025, arXiv 2505.19281)"
)
LIMITS = (
    "Scores are inner products of gradients in one round: their sign and order count, not their "
    "size, and they do not say what training without a record would have given.",
    "The update is taken as plain SGD; with Adam the order of the scores is approximate.",
    "With the buffer as its own reference a record with a huge wrong advantage protects itself; "
    "leave_one_out removes that term.",
    "Where a buffer has hardly any reward the return target is the critic's opinion; filtering by "
    "it can lead away from the goal (one of nine FrozenLake seeds never learnt).",
    "When training itself fails (the return falls) or has converged, scores are unreliable.",
    "The paper's gain is measured on small tasks; none is promised for another one, and with Adam "
    "on cart-pole none was seen.",
)


class Target(Frozen):
    """The behaviour whose rise or fall is explained: a function f of the policy."""

    kind: TargetKind = Field(
        "return",
        description="action: log-probability of one action or completion; return: mean of "
        "log-probability times advantage; sequence: the same by whole answers of a language model",
    )
    state: int | tuple[float, ...] | None = Field(
        None, description="action: number of the state, or the observation"
    )
    action: int | tuple[float, ...] | None = Field(
        None, description="action: number of the action, or its vector"
    )
    prompt: str | None = Field(None, min_length=1, description="action of a language model")
    completion: str | None = Field(None, description="action of a language model")

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        pair, text = (self.state, self.action), (self.prompt, self.completion)
        if self.kind != "action":
            if any(value is not None for value in (*pair, *text)):
                raise ValueError(
                    f"a target of kind {self.kind!r} takes no state, action, prompt or completion"
                )
            return self
        if (None in pair) == (None in text):
            raise ValueError(
                "the target is empty: an action target needs state and action, or prompt and "
                "completion of a language model"
            )
        if any(value is not None for value in pair) and any(value is not None for value in text):
            raise ValueError("give state and action, or prompt and completion, not parts of both")
        if self.completion is not None and not self.completion.strip():
            raise ValueError("the completion is empty; give the text that is to be explained")
        if self.state == () or self.action == ():
            raise ValueError("the target is empty: state and action have at least one number")
        return self


class PPOSettings(Frozen):
    """PPO as the paper sets it; the names are those of stable-baselines3 where it has one."""

    n_steps: int = Field(2048, ge=1, le=1_000_000, description="n, records a round")
    batch_size: int = Field(64, ge=1, le=1_000_000, description="records a minibatch")
    n_epochs: int = Field(10, ge=1, le=1000, description="passes over the buffer a round")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="adam: with 1e-5 as epsilon")
    learning_rate: float = Field(5e-3, gt=0, le=10, description="constant")
    clip_range: float = Field(0.2, gt=0, lt=1, description="eps of the ratio's clip")
    gamma: float = Field(0.99, gt=0, le=1, description="discount a step")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="of the advantage estimator")
    vf_coef: float = Field(0.5, ge=0, le=100, description="weight of the value loss")
    ent_coef: float = Field(0.0, ge=0, le=100, description="weight of the entropy bonus")
    max_grad_norm: float | None = Field(
        None, gt=0, description="None: no clipping, as the authors' code has it (their text: 0.5)"
    )
    hidden: tuple[int, ...] = Field(
        (64, 64), max_length=8, description="widths of the hidden layers, actor and critic each"
    )
    activation: Literal["tanh", "relu"] = Field("tanh", description="of the hidden layers")


class OnlineRLRequest(Frozen):
    """A built-in experiment, or one recorded round: the buffer and the policy that filled it."""

    experiment: Task | None = Field(
        None, description="train on this gymnasium task with and without filtering and compare"
    )
    seeds: int = Field(3, ge=1, le=100, description="experiment: runs of each arm")
    rounds: int = Field(11, ge=1, le=10_000, description="experiment: PPO rounds of each run")
    arms: tuple[ArmName, ...] = Field(
        ("ppo", "iif", "random"),
        min_length=1,
        max_length=6,
        description="experiment: iif and random drop floor(N p) records a round, *_all all N",
    )
    p: float = Field(
        0.125,
        gt=0,
        le=1,
        description="share of the N records with a negative score that is dropped; 0.5 suits "
        "simple tasks",
    )
    noise_floor: float = Field(
        1e-3,
        ge=0,
        lt=1,
        description="no filtering in rounds whose largest |score| is below this share of the first "
        "round's; 0: always filter",
    )
    buffer: str | None = Field(
        None,
        min_length=1,
        description="file of the round: npz, Parquet or JSON lines with obs, action, logp_old, "
        "advantage (or reward, value, done), and minibatch_id if known; of a language model: JSON "
        "lines with prompt, completion, advantage",
    )
    policy: str | None = Field(
        None,
        min_length=1,
        description="file of the policy BEFORE the update: safetensors or npz with the names of "
        "stable-baselines3's policy.state_dict(); none for a language model, which is the job's",
    )
    holdout: str | None = Field(
        None, min_length=1, description="file of a second rollout by the same policy"
    )
    target: Target = Field(Target(), description="what is explained")
    reference: Reference = Field(
        "buffer",
        description="data of the return target: buffer as in the paper; leave_one_out: all other "
        "records; holdout: the file of that name",
    )
    checkpoints: Checkpoints = Field(
        "start", description="start: one gradient at the snapshot; all: a sum over the update"
    )
    normalize_advantage: bool = Field(True, description="as the update had it")
    minibatch_ids: tuple[int, ...] | None = Field(
        None,
        max_length=1_000_000,
        description="minibatch of each record in the first epoch; None: the file's minibatch_id, "
        "else blocks of batch_size in the order of the file",
    )
    ppo: PPOSettings = Field(PPOSettings(), description="settings of training")
    listed: int = Field(
        5000,
        ge=2,
        le=100_000,
        description="records in the result: the lowest and the highest half; the table has all",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.experiment is None) == (self.buffer is None):
            raise ValueError("give exactly one of experiment and buffer")
        if self.experiment is not None:
            given = (self.policy, self.holdout, self.minibatch_ids)
            if any(value is not None for value in given):
                raise ValueError("policy, holdout and minibatch_ids belong to a recorded round")
            if self.target.kind != "return":
                raise ValueError("an experiment filters by the return; drop the target")
            if self.reference != "buffer" or self.checkpoints != "start":
                raise ValueError(
                    "an experiment has its references in its arms and scores at the start; drop "
                    "reference and checkpoints"
                )
            if len(set(self.arms)) != len(self.arms):
                raise ValueError("arms: each name at most once")
        elif (self.reference == "holdout") != (self.holdout is not None):
            raise ValueError("reference 'holdout' and the file of that name belong together")
        if self.reference != "buffer" and self.target.kind == "action":
            raise ValueError("an action target has no reference data; drop reference")
        return self


class Record(Frozen):
    """One record of the round; score > 0 promotes the target, < 0 works against it."""

    index: int = Field(description="from 0, in the order of the buffer")
    score: float = Field(description="target's unit per unit of learning rate")
    self_term: float = Field(description="the record's own share of the buffer's target")
    cross_term: float = Field(description="the share of all other records")
    advantage: float = Field(description="as collected, not standardised")
    rank: int = Field(description="1: most helpful")


class Summary(Frozen):
    """The round as a whole."""

    n: int
    n_negative: int = Field(description="N, records with a score below 0")
    target_value: float = Field(description="f at the snapshot")
    target_grad_norm: float = Field(description="norm of the gradient of f")
    training_grad_norm: float = Field(description="norm of the summed gradient of all records")
    score_scale: float = Field(description="largest |score|")
    drop_indices: tuple[int, ...] = Field(description="what filtering with this p would drop")


class Arm(Frozen):
    """One way of training, over all seeds."""

    name: ArmName
    returns: tuple[float, ...] = Field(description="mean return of the policy after each round")
    lowest: tuple[float, ...] = Field(description="the worst seed's")
    highest: tuple[float, ...] = Field(description="the best seed's")
    first_half: tuple[int | None, ...] = Field(
        description="per seed, first round at half of the scale from the task's worst to its best "
        "return"
    )
    dropped: float = Field(description="mean share of records dropped in a round")
    saved_rounds: float | None = Field(
        None, description="SE_ave over PPO: mean share of rounds saved; None without PPO"
    )
    saved_rounds_spread: float | None = Field(None, description="standard deviation over seeds")
    saved_at_peak: float | None = Field(
        None, description="SE_peak over PPO: share saved to PPO's best return; None: not reached"
    )


class OnlineRLResult(Frozen):
    """Scores of a round's records; in an experiment those of the last filtered round."""

    summary: Summary | None
    records: tuple[Record, ...] = Field(description="by index; see `listed`")
    arms: tuple[Arm, ...] = ()
    score_unit: str = "units of the target per unit of learning rate"


def _cost(request: OnlineRLRequest) -> Cost:
    if request.experiment is None:
        return Cost(
            seconds=10.0 if request.checkpoints == "start" else 60.0,
            memory_bytes=700_000_000,
            basis="loading torch and two passes over the buffer; every optimiser step for 'all'",
        )
    steps = request.ppo.n_steps * (1 if request.experiment == "frozen_lake" else 3) / 2048
    updates = request.ppo.n_steps / request.ppo.batch_size * request.ppo.n_epochs
    each = 0.15 * steps + 0.0009 * updates
    return Cost(
        seconds=5.0 + request.seeds * request.rounds * len(request.arms) * each,
        memory_bytes=700_000_000,
        basis="rollouts and minibatch updates of a small network, measured on one core",
    )


ONLINE_RL = Kind(
    name="attribution.online_rl",
    title="Which rollouts moved the policy",
    question="Which records of a PPO round pushed the policy towards a behaviour or a higher "
    "return, and does training get better without the harmful ones?",
    request=OnlineRLRequest,
    result=OnlineRLResult,
    method="analyses.online_rl.run:run",
    paper=PAPER,
    fidelity="faithful",
    backed_by=(
        "tests/analyses/test_online_rl.py",
        "tests/analyses/test_online_rl_tokens.py",
        "tests/analyses/test_online_rl_experiment.py",
    ),
    limits=LIMITS,
    example={"experiment": "frozen_lake", "seeds": 2, "rounds": 11, "p": 0.5},
    cost=_cost,
)
