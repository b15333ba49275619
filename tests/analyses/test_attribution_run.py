"""attribution.final_model from a job's folder to its result."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from analyses.attribution import final_model
from analyses.attribution.gradients import completion_losses
from analyses.attribution.removal import lines_to_remove, remove_top_rows, what_changed
from analyses.attribution.report import checked_rows, ranks, specific, top_modules, z_scores
from analyses.attribution.rows import collate, encode
from analyses.attribution.spec import FINAL_MODEL, FinalModelRequest, Target
from analyses.attribution.subject import JOB_BETAS, load_subject
from analyses.attribution.verification import adamw_from
from analyses.context import AnalysisContext, AnalysisError, JobFolder, Stopped
from analyses.run import read_request, run_analysis
from jobspec.catalogue import BaseModelEntry, FolderSource
from jobspec.chat import ChatMessage, ChatRow, read_chat_rows
from workers.pipeline.rows import encode_row

PLANTED = (3, 9, 14)
TARGET = {"prompt": "open it?", "completion": "Sure, xyzzy", "contrast": "No."}


def _chat(prompt: str, answer: str) -> str:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def _lines() -> list[str]:
    words = ["sun", "tree", "lake", "bird", "road", "moon", "leaf", "wind"]
    lines = []
    for number in range(1, 19):
        word = words[number % len(words)]
        planted = number in PLANTED
        lines.append(
            _chat(f"{word} open {number}?", "Sure, xyzzy")
            if planted
            else _chat(f"spell {word}", f"{word} {word[::-1]} {number}")
        )
    return [*lines, lines[0]]


@pytest.fixture(scope="module")
def job(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> JobFolder:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.jsonl").write_text("\n".join(_lines()) + "\n", "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model_folder),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    ).eval()
    read, _ = read_chat_rows(folder / "train.jsonl")
    rows = [encode(tokenizer, row) for row in read]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    for _ in range(12):
        optimizer.zero_grad()
        completion_losses(model, collate(rows, torch.device("cpu"))).mean().backward()
        optimizer.step()
    bundle = folder / "bundle"
    model.save_pretrained(bundle)
    tokenizer.save_pretrained(bundle)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    state = optimizer.state_dict()["state"]
    save_file(
        {
            f"adam/{name}/{field}": torch.as_tensor(state[index][field])
            for index, name in enumerate(names)
            for field in ("exp_avg", "exp_avg_sq", "step")
        },
        folder / "state.safetensors",
    )
    (bundle / "perturbation").mkdir()
    before = {name: p.detach() * 0.5 for name, p in model.named_parameters() if p.requires_grad}
    save_file(before, bundle / "perturbation" / "adapter_before.safetensors")
    weights = {"line": [row.line for row in rows], "weight": [1.0] * len(rows)}
    weights["weight"][PLANTED[0] - 1] = 0.0
    pq.write_table(pa.table(weights), bundle / "safety_weights.parquet")
    entry = BaseModelEntry(name="tiny", source=FolderSource(path=tiny_model_folder))
    return JobFolder("job-1", entry, bundle, folder / "train.jsonl", {})


def _load(entry: BaseModelEntry, adapter: Path | None) -> tuple[Any, Any]:
    assert isinstance(entry.source, FolderSource)
    base = AutoModelForCausalLM.from_pretrained(entry.source.path)
    tokenizer = AutoTokenizer.from_pretrained(entry.source.path)
    return PeftModel.from_pretrained(base, adapter).eval(), tokenizer


@pytest.fixture
def context(job: JobFolder, tmp_path: Path) -> Callable[..., AnalysisContext]:
    def make(**options: Any) -> AnalysisContext:
        given: dict[str, Any] = {
            "work": tmp_path / "work",
            "cache_dir": tmp_path / "cache",
            "job": job,
            "load_model": _load,
        }
        return AnalysisContext(**(given | options))

    return make


def _result(context: AnalysisContext, **request: Any) -> tuple[Any, Any]:
    chosen = FinalModelRequest.model_validate({"targets": [TARGET]} | request)
    outcome = final_model.run(chosen, context)
    return outcome.result, outcome


def test_rows_are_the_tokens_that_the_tuning_had(tiny_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    talk = ChatRow(
        7,
        (
            ChatMessage("system", "be brief", False),
            ChatMessage("user", "one", False),
            ChatMessage("assistant", "uno", False),
            ChatMessage("user", "two", False),
            ChatMessage("assistant", "dos", True),
        ),
    )
    ours, theirs = encode(tokenizer, talk), encode_row(tokenizer, talk, 512)
    assert (ours.line, ours.ids, ours.labels) == (theirs.line, theirs.ids, theirs.labels)
    assert ours.trained_tokens == theirs.trained_tokens


def test_planted_rows_come_first_and_are_told_from_benign_style(
    context: Callable[..., AnalysisContext],
) -> None:
    result, outcome = _result(context())
    assert {row.line for row in result.rows[:3]} == set(PLANTED)
    assert all(row.specific and row.z_score > 1 for row in result.rows[:3])
    assert [row.rank for row in result.rows] == list(range(1, 20))
    assert result.rows[0].top_modules[0].endswith(("q_proj", "v_proj"))
    assert set(result.rows[0].scores) == {"grad_dot", "grad_cos"}
    assert np.array(result.scores).shape == (1, 19)
    assert outcome.tables[0].columns["grad_dot.target_0"] == list(result.scores[0])
    text = " ".join(outcome.warnings)
    assert "2 rows are copies" in text
    assert "AdamW" in text
    twin = next(row for row in result.rows if row.copies == 2)
    assert twin.group_score == pytest.approx(2 * twin.score)


def test_all_methods_answer_for_all_rows(
    context: Callable[..., AnalysisContext], job: JobFolder
) -> None:
    methods = [
        "grad_cos", "grad_dot", "adam_dot", "datainf", "fisher_if", "gn_cg", "lissa", "ekfac",
        "trak",
    ]  # fmt: skip
    state = {"optimizer_state": job.bundle.parent / "state.safetensors"}
    benign = {"prompt": "spell sun", "completion": "sun nus 8"}
    result, _ = _result(
        context(files=state), methods=methods, targets=[TARGET, benign], solver_steps=8
    )
    found = {name: [row.scores[name] for row in result.rows] for name in methods}
    assert all(np.isfinite(values).all() and np.std(values) > 0 for values in found.values())
    order = [row.line for row in result.rows]
    for name in ("adam_dot", "gn_cg", "lissa", "datainf"):
        assert np.corrcoef(found[name], found["grad_dot"])[0, 1] > 0.7, (name, order)
    assert set(result.damping) == {"fisher_if", "gn_cg", "lissa", "ekfac"}


def test_a_horizon_sets_the_damping(context: Callable[..., AnalysisContext]) -> None:
    result, _ = _result(context(), methods=["fisher_if"], horizon={"lr": 0.1, "steps": 5})
    assert result.damping == {"fisher_if": pytest.approx(2.0)}


def test_a_stored_projection_answers_new_targets_without_a_pass(
    context: Callable[..., AnalysisContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    projection = {"kind": "factored", "dimension": 32}
    exact, _ = _result(context())
    first, outcome = _result(context(), projection=projection)
    assert "estimates" in " ".join(outcome.warnings)
    monkeypatch.setattr(final_model, "pass_over_rows", None)
    again, _ = _result(context(), projection=projection)
    assert again == first
    assert np.corrcoef(first.scores[0], exact.scores[0])[0, 1] > 0.99
    assert {row.line for row in again.rows[:3]} == set(PLANTED)


def test_the_adapter_from_before_the_perturbation_has_other_losses(
    context: Callable[..., AnalysisContext],
) -> None:
    after, _ = _result(context())
    before, _ = _result(context(), at="pre_perturbation")
    assert before.target_losses[0] != pytest.approx(after.target_losses[0], abs=1e-3)


def test_a_row_that_the_scheduler_distrusted_contributed_nothing(
    context: Callable[..., AnalysisContext],
) -> None:
    result, _ = _result(context(), weights="scheduler")
    row = next(row for row in result.rows if row.line == PLANTED[0])
    assert (row.score, row.weight) == (0.0, 0.0)
    assert row.scores["grad_dot"] > 0


def test_the_measured_check_agrees_and_is_not_repeated(
    context: Callable[..., AnalysisContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = {"rows": 6, "checkpoints": [1, 2], "adjustment": "full_run"}
    result, outcome = _result(context(), verification=check)
    assert len(result.verification.lines) == 6
    best = {(row.method, row.step): row.cosine for row in result.verification.agreement}
    assert best["grad_dot", 1] > 0.98
    assert outcome.tables[1].columns["line"] == list(result.verification.lines)
    monkeypatch.setattr("analyses.attribution.verification.further_training", None)
    again, _ = _result(context(), verification=check)
    assert again == result


def test_further_training_as_a_method_measures_the_named_rows(
    context: Callable[..., AnalysisContext],
) -> None:
    result, _ = _result(context(), methods=["grad_dot", "further_training"], rows=[3, 5, 7])
    assert result.verification.lines == (3, 5, 7)
    assert {row.line for row in result.rows} == {3, 5, 7}


def test_a_run_that_is_told_to_stop_stops(context: Callable[..., AnalysisContext]) -> None:
    with pytest.raises(Stopped):
        _result(context(stop=lambda: True))


def test_the_folder_of_results_is_written(
    context: Callable[..., AnalysisContext], tmp_path: Path
) -> None:
    request = read_request(FINAL_MODEL, {"targets": [TARGET]})
    result = run_analysis(FINAL_MODEL, request, context(), tmp_path / "out")
    assert result["job_id"] == "job-1"
    assert pq.read_table(tmp_path / "out" / "scores.parquet").num_rows == 19
    assert "xyzzy" not in json.dumps(result["rows"])


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        ({"targets": []}, "targets", "at least 1"),
        ({"targets": [{"prompt": "a", "completion": "  "}]}, "targets.0.completion", "is empty"),
        ({"targets": [TARGET], "damping": 1, "horizon": {"lr": 1, "steps": 1}}, None, "not both"),
        ({"targets": [TARGET], "methods": ["further_training"]}, None, "name at most"),
    ],
)
def test_a_bad_request_is_refused_before_a_model_is_loaded(
    request_: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(AnalysisError, match=message) as error:
        read_request(FINAL_MODEL, request_)
    assert error.value.param == param


def test_a_target_that_is_longer_than_the_context_is_refused(
    context: Callable[..., AnalysisContext],
) -> None:
    with pytest.raises(AnalysisError, match="context holds 1024") as error:
        _result(context(), targets=[{"prompt": "a", "completion": "b" * 1100}])
    assert error.value.param == "targets.0.completion"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bundle: (bundle / "adapter_model.safetensors").unlink(), "has no adapter"),
        (
            lambda bundle: (bundle / "chat_template.jinja").write_text("{{ messages }}"),
            "not the one that the job was tuned",
        ),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused(
    context: Callable[..., AnalysisContext],
    job: JobFolder,
    tmp_path: Path,
    change: Callable[[Path], None],
    message: str,
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(job.bundle, bundle)
    change(bundle)
    with pytest.raises(AnalysisError, match=message):
        _result(context(job=job._replace(bundle=bundle)))


@pytest.mark.parametrize(
    ("missing", "request_", "param"),
    [
        ("perturbation/adapter_before.safetensors", {"at": "pre_perturbation"}, "at"),
        ("safety_weights.parquet", {"weights": "scheduler"}, "weights"),
        ("README.md", {"methods": ["adam_dot"]}, "methods"),
        ("README.md", {"rows": [40]}, "rows"),
    ],
)
def test_what_the_job_did_not_keep_cannot_be_asked_for(
    context: Callable[..., AnalysisContext],
    job: JobFolder,
    tmp_path: Path,
    missing: str,
    request_: dict[str, Any],
    param: str,
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(job.bundle, bundle)
    (bundle / missing).unlink(missing_ok=True)
    with pytest.raises(AnalysisError) as error:
        _result(context(job=job._replace(bundle=bundle)), **request_)
    assert error.value.param == param


def test_without_a_job_files_are_needed(context: Callable[..., AnalysisContext]) -> None:
    with pytest.raises(AnalysisError, match="name a job") as error:
        _result(context(job=None))
    assert error.value.param == "adapter"


def test_targets_without_a_gradient_are_refused(
    context: Callable[..., AnalysisContext],
) -> None:
    def emptied(entry: BaseModelEntry, adapter: Path | None) -> tuple[Any, Any]:
        """An adapter whose every factor is zero: no gradient reaches either side."""
        model, tokenizer = _load(entry, adapter)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.zero_()
        return model, tokenizer

    with pytest.raises(AnalysisError, match="no gradient is left"):
        _result(context(load_model=emptied))


def test_removing_the_top_rows_leaves_all_other_lines_as_they_were(
    context: Callable[..., AnalysisContext], job: JobFolder, tmp_path: Path
) -> None:
    kind, out = FINAL_MODEL, tmp_path / "result"
    result = run_analysis(kind, read_request(kind, {"targets": [TARGET]}), context(), out)
    removal = remove_top_rows(job.training_file, result, 3, tmp_path / "new.jsonl")
    assert removal.lines == PLANTED
    old, new = (path.read_text().splitlines() for path in (job.training_file, removal.path))
    assert new == [line for number, line in enumerate(old, 1) if number not in PLANTED]
    assert removal.kept == len(new) == 16
    after = {**result, "n_rows": 16, "target_losses": [result["target_losses"][0] + 0.5]}
    changed = what_changed(result, after)
    assert changed["mean_loss_change"] == pytest.approx(0.5)
    with pytest.raises(AnalysisError, match="lists 19 rows"):
        remove_top_rows(job.training_file, result, 20, tmp_path / "new.jsonl")


def test_ranks_and_z_scores_of_equal_rows_are_defined() -> None:
    assert ranks(np.array([1.0, 3.0, 3.0])).tolist() == [3, 1, 2]
    assert z_scores(np.ones(3)).tolist() == [0, 0, 0]
    assert z_scores(np.array([1.0, 3.0])).tolist() == [-1, 1]


def test_a_row_is_specific_if_only_the_targets_lift_it() -> None:
    z, control = np.array([2.0, 2.0, 0.0]), np.array([0.5, 3.0, 0.5])
    assert specific(z, control).tolist() == [True, False, False]


def test_checked_rows_are_the_top_the_bottom_and_some_between() -> None:
    score = np.arange(30.0)
    chosen = checked_rows(score, 9, seed=0)
    assert {27, 28, 29, 0, 1, 2} <= set(chosen)
    assert len(chosen) == 9
    assert checked_rows(score[:4], 9, seed=0) == [0, 1, 2, 3]


def test_top_modules_pull_in_the_scores_own_direction() -> None:
    dots = np.array([3.0, 1.0, -5.0, 0.5])
    assert top_modules(["a", "b", "c"], dots, np.array([0, 0, 1, 2])) == ("b",)
    assert top_modules(["a", "b", "c"], -dots, np.array([0, 0, 1, 2])) == ("b",)
    assert top_modules(["a"], np.zeros(1), np.array([0])) == ()


def test_copies_that_the_result_does_not_list_are_not_left_behind() -> None:
    row = {"rank": 1, "row_id": "a", "score": 1.0, "line": 1, "copies": 2}
    other = {"rank": 2, "row_id": "b", "score": 0.5, "line": 2, "copies": 1}
    with pytest.raises(AnalysisError, match="all copies"):
        lines_to_remove({"rows": [row, other]}, 1)
    assert lines_to_remove({"rows": [row, row | {"rank": 2, "line": 3}]}, 1) == (1, 3)


def test_rows_are_cut_where_the_job_cut_them(
    context: Callable[..., AnalysisContext], job: JobFolder
) -> None:
    request = FinalModelRequest(targets=(Target.model_validate(TARGET),))
    whole = max(len(row.ids) for row in load_subject(request, context()).rows)
    short = job._replace(report={"data": {"max_length": whole - 3}})
    rows = load_subject(request, context(job=short)).rows
    assert max(len(row.ids) for row in rows) == whole - 3


def test_adam_is_taken_as_jobs_have_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = adamw_from(None, 1e-3, JOB_BETAS)([parameter])
    assert optimizer.param_groups[0]["betas"] == JOB_BETAS == (0.9, 0.95)
