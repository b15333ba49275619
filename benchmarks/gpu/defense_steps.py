"""Speed and memory of the defenses' training steps on a GPU, with random weights; see README.md.

    python benchmarks/gpu/defense_steps.py [--device cuda] [--shape llama2_7b] [--output FILE]

A step of b rows of T tokens costs, in forward-and-backward passes over b rows: plain 1, mixing and
BDS 2, Panacea joint 3, joint with BDS 4. Anything beyond is overhead of the implementation.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import peft
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from defenses.losses import response_nll_and_accuracy_B, response_token_mean_nll
from defenses.method import MethodContext, RowFeatures, StepLosses, StepRecord, TuningMethod
from defenses.panacea.perturbation import panacea_gradients, relative_rho
from defenses.registry import build_method
from jobspec.defense import MixOptions, PlainOptions, SchedulerOptions, TuningOptions

TRAINING_ROWS = 1000
EMBEDDING_WIDTH = 384
LEAST_SECONDS = 20.0

Record = dict[str, Any]


class Shape(NamedTuple):
    """A causal model without its weights."""

    model: Any
    config: Any
    sizes: dict[str, Any]


SHAPES = {
    "llama2_7b": Shape(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "qwen2_7b": Shape(
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "llama_1b": Shape(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": Shape(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
GPU_SHAPES = ("llama2_7b", "qwen2_7b", "llama_1b")


class Batch(NamedTuple):
    """int64 [B, T] each."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    labels_BT: Tensor

    def joined(self, other: "Batch") -> "Batch":
        return Batch(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


class Steps:
    """One model of a shape, three batches of equal rows, and every way to take a step."""

    def __init__(self, shape: Shape, device: torch.device, rows: int, tokens: int) -> None:
        self.device, self.rows, self.tokens = device, rows, tokens
        self.model = build_model(shape, device)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), lr=1e-5)
        generator = torch.Generator().manual_seed(0)
        vocabulary = shape.sizes["vocab_size"]
        self.user, self.alignment, self.harmful = (
            self._batch(vocabulary, generator) for _ in range(3)
        )
        self.both = self.alignment.joined(self.user)
        self.ids = torch.randperm(TRAINING_ROWS, generator=generator)[:rows]
        self.count = 0

    def ways(self) -> dict[str, Callable[[], None]]:
        features = RowFeatures("benchmark", torch.randn(TRAINING_ROWS, EMBEDDING_WIDTH))
        neural = SchedulerOptions(form="neural", scorer="embedding")
        plain, bds = self._method(PlainOptions()), self._method(SchedulerOptions())
        mixing, scorer = self._method(MixOptions()), self._method(neural, features)
        return {
            "plain": lambda: self._tune(plain, self.user),
            "two passes, full logits": self._full_logits,
            "mixing": lambda: self._tune(mixing, self.both),
            "bds": lambda: self._tune(bds, self.both),
            "bds neural": lambda: self._tune(scorer, self.both),
            "panacea joint": lambda: self._tune_jointly(plain, self.user),
            "panacea joint, bds": lambda: self._tune_jointly(bds, self.both),
        }

    def tokens_of(self, way: str) -> int:
        """Tokens that a step reads, each row as often as it goes through the model."""
        passes = {"plain": 1, "panacea joint": 3, "panacea joint, bds": 4}.get(way, 2)
        return passes * self.rows * self.tokens

    def _tune(self, method: TuningMethod, batch: Batch) -> None:
        seen: list[Tensor] = []
        torch.autograd.backward(self._objective(method, batch, seen))
        self._update()
        self._learn(method, seen[0])

    def _tune_jointly(self, method: TuningMethod, batch: Batch) -> None:
        seen: list[Tensor] = []
        found = panacea_gradients(
            lambda: self._objective(method, batch, seen),
            lambda: response_token_mean_nll(self.model, *self.harmful),
            self.parameters,
            rho=relative_rho(self.parameters),
            strength=1e-3,
            clamp=1e3,
        )
        for name, parameter in self.parameters.items():
            parameter.grad = found.direction[name]
        self._update()
        self._learn(method, seen[0])

    def _full_logits(self) -> None:
        for batch in (self.alignment, self.user):
            torch.autograd.backward(
                self.model(
                    input_ids=batch.input_ids_BT,
                    attention_mask=batch.attention_mask_BT,
                    labels=batch.labels_BT,
                    use_cache=False,
                ).loss
            )
        self._update()

    def _objective(self, method: TuningMethod, batch: Batch, seen: list[Tensor]) -> Tensor:
        nll_B = response_nll_and_accuracy_B(self.model, *batch).nll
        a_B, l_B = nll_B[: -self.rows], nll_B[-self.rows :]
        seen.append(l_B.detach())
        losses = StepLosses(
            user_B=l_B,
            alignment_B=a_B,
            row_ids_B=self.ids,
            step_ids=self.ids,
            user_count=len(l_B),
            alignment_count=len(a_B),
            step=self.count,
            epoch=0,
            processes=1,
        )
        return method.objective(losses)

    def _learn(self, method: TuningMethod, losses_B: Tensor) -> None:
        none = torch.empty(0, dtype=torch.float64)
        record = StepRecord(self.ids, losses_B.double().cpu(), none.long(), none, self.count, 0)
        method.learn(record)
        self.count += 1

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _method(self, options: TuningOptions, features: RowFeatures | None = None) -> TuningMethod:
        context = MethodContext(
            row_count=TRAINING_ROWS,
            canary_count=0,
            user_steps=1000,
            steps_per_epoch=100,
            parameters=self.parameters,
            seed=0,
            features=features,
        )
        return build_method(options, context)

    def _batch(self, vocabulary: int, generator: torch.Generator) -> Batch:
        ids_BT = torch.randint(3, vocabulary, (self.rows, self.tokens), generator=generator)
        labels_BT = ids_BT.clone()
        labels_BT[:, : -max(1, self.tokens // 4)] = -100
        batch = Batch(ids_BT, torch.ones_like(ids_BT), labels_BT)
        return Batch(*(tensor.to(self.device) for tensor in batch))


def build_model(shape: Shape, device: torch.device) -> Any:
    """Random weights made on the device in bfloat16, with a fresh float32 LoRA."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            base = shape.model(shape.config(**shape.sizes))
    finally:
        torch.set_default_dtype(before)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = peft.LoraConfig(
        r=32, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, lora, autocast_adapter_dtype=True).train()


def measure_shape(
    name: str, device: torch.device, rows: int, tokens: int, rounds: int, deadline: float
) -> list[Record]:
    """One record a way; a way that did not fit into memory says so."""
    steps = Steps(SHAPES[name], device, rows, tokens)
    ways = steps.ways()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peak: dict[str, int | None] = dict.fromkeys(ways)
    failed: dict[str, str] = {}
    # The first call of each way warms up and measures its peak.
    for way, take in ways.items():
        if time.monotonic() > deadline:
            failed[way] = "no time left"
            continue
        try:
            _, peak[way] = _timed(take, device)
        except torch.OutOfMemoryError:
            failed[way] = "out of memory"
            steps.optimizer.zero_grad(set_to_none=True)
            _release(device)
    for _ in range(rounds):
        for way, take in ways.items():
            if way not in failed and time.monotonic() < deadline:
                seconds[way].append(_timed(take, device)[0])
    records: list[Record] = []
    for way, values in seconds.items():
        median = statistics.median(values) if values else None
        records.append(
            {
                "shape": name,
                "way": way,
                "rounds": len(values),
                "seconds_per_step": median,
                "tokens_per_second": steps.tokens_of(way) / median if median else None,
                "peak_bytes": peak[way],
                "failed": failed.get(way) or (None if values else "no time left"),
            }
        )
    return records


def ratios(records: Sequence[Record], machine: str) -> list[Record]:
    """Ratios of one shape in the form of the other benchmarks' results."""
    found = {record["way"]: record for record in records}
    shape = records[0]["shape"]
    lines: list[Record] = []

    def add(field: str, one: str, other: str, target: float | None, limit: str) -> None:
        top, bottom = found[one][field], found[other][field]
        if top is None or bottom is None:
            return
        what = "step" if field == "seconds_per_step" else "peak memory"
        lines.append(
            {
                "name": f"{shape}: {what}, {one} / {other}",
                "ratio": round(top / bottom, 4),
                "target": target,
                "better": "lower",
                "met": target is None or top / bottom <= target,
                "limit": limit,
                "unit": "seconds/seconds" if what == "step" else "bytes/bytes",
                "machine": machine,
            }
        )

    step, memory = "seconds_per_step", "peak_bytes"
    add(step, "bds", "mixing", 1.10, "1.0: the scheduler is vector work over N logits")
    add(step, "bds neural", "bds", 1.25, "1.0: a small head over b rows")
    add(step, "bds", "plain", 2.1, "2.0: twice the rows")
    add(step, "bds", "two passes, full logits", None, "1.0 less what projecting all rows costs")
    add(step, "panacea joint", "plain", 3.15, "3.0: three passes")
    add(step, "panacea joint, bds", "bds", 2.1, "2.0: four passes over two")
    add(memory, "bds", "mixing", 1.15, "1.0: N logits")
    add(memory, "bds", "two passes, full logits", None, "weights weigh alike; logits do not")
    add(memory, "panacea joint", "plain", 1.15, "1.0: a few buffers of the adapter's size")
    return lines


def run(
    shapes: Sequence[str],
    device: torch.device,
    *,
    rows: int = 8,
    tokens: int = 512,
    minutes: float = 5.5,
    rounds: int = 5,
    output: Path | None = None,
) -> Record:
    """Measures every shape in its share of the time; prints and writes what there is after each."""
    end = time.monotonic() + 60.0 * minutes
    machine = f"{_device_name(device)}, torch {torch.__version__}"
    report: Record = {
        "machine": machine,
        "versions": {"transformers": transformers.__version__, "peft": peft.__version__},
        "rows": rows,
        "tokens": tokens,
        "steps": [],
        "results": [],
        "left_out": [],
    }
    for place, name in enumerate(shapes):
        left = end - time.monotonic()
        if left < LEAST_SECONDS and place > 0:
            report["left_out"].append(name)
            continue
        deadline = time.monotonic() + left / (len(shapes) - place)
        try:
            records = measure_shape(name, device, rows, tokens, rounds, deadline)
        except torch.OutOfMemoryError:
            report["left_out"].append(name)
        else:
            report["steps"] += records
            report["results"] += ratios(records, machine)
            _print(records, ratios(records, machine))
        _release(device)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report, indent=2) + "\n")
    if report["left_out"]:
        print("left out for want of time or memory:", ", ".join(report["left_out"]), flush=True)
    return report


def _timed(take: Callable[[], None], device: torch.device) -> tuple[float, int | None]:
    """Seconds of one step and the most memory that tensors held during it."""
    if device.type != "cuda":
        started = time.process_time()
        take()
        return time.process_time() - started, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    take()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, torch.cuda.max_memory_allocated(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _print(records: Sequence[Record], lines: Sequence[Record]) -> None:
    for record in records:
        peak = "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 1e9:8.2f} GB"
        speed = (
            record["failed"]
            or f"{record['seconds_per_step']:8.3f} s/step {record['tokens_per_second']:10.0f} tok/s"
        )
        print(f"{record['shape']:10} {record['way']:24} {speed} {peak}", flush=True)
    for line in lines:
        target = "" if line["target"] is None else f", target <= {line['target']}"
        missed = "" if line["met"] else "  MISSED"
        print(f"{line['name']}: {line['ratio']:.3f} (limit {line['limit']}{target}){missed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=5.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    run(
        arguments.shape or GPU_SHAPES,
        torch.device(arguments.device),
        rows=arguments.rows,
        tokens=arguments.tokens,
        minutes=arguments.minutes,
        rounds=arguments.rounds,
        output=arguments.output,
    )


if __name__ == "__main__":
    main()
