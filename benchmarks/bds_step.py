"""What a BDS training step costs beside plain LoRA tuning, measured side by side in one run.

    python -m benchmarks.bds_step [--model PATH] [--output benchmarks/results]

Three steps on the same model, rows and adapter, in turn, medians over the rounds:
plain: 8 user rows, the model's own loss. bds: 8 alignment + 8 user rows in one forward, response
positions only, scheduler step included. separate: the same 16 rows as two plain passes.
Steps are timed in CPU seconds of one thread, so that other work on the machine does not count.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from defenses.bds.scheduler import ScalarScheduler, bds_objective
from defenses.losses import response_nll_B
from jobspec.defense import SchedulerOptions

ROWS = 8
TOKENS = 96
SUPERVISED_TOKENS = 24
TRAINING_ROWS = 1000
MEMORY_STEPS = 2

SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


class Batch(NamedTuple):
    """int64 [B, T] each."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class Steps:
    """One model with its optimiser and scheduler, and the three ways to train a step."""

    def __init__(self, model_path: str | None) -> None:
        torch.manual_seed(0)
        base = (
            AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            if model_path
            else AutoModelForCausalLM.from_config(SMOLLM2_135M, dtype=torch.float32)
        )
        lora = LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
        self.model: Any = get_peft_model(base, lora).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, betas=(0.9, 0.95))
        self.scheduler = ScalarScheduler(TRAINING_ROWS, SchedulerOptions(name="bds"))
        generator = torch.Generator().manual_seed(0)
        self.user = self._batch(generator)
        self.alignment = self._batch(generator)
        self.row_ids_B = torch.randperm(TRAINING_ROWS, generator=generator)[:ROWS]

    def plain(self) -> None:
        torch.autograd.backward(self._own_loss(self.user))
        self._update()

    def separate(self) -> None:
        torch.autograd.backward(self._own_loss(self.alignment))
        torch.autograd.backward(self._own_loss(self.user))
        self._update()

    def bds(self) -> None:
        both = Batch(*(torch.cat(pair) for pair in zip(self.alignment, self.user, strict=True)))
        losses_B = response_nll_B(self.model, *both)
        alignment, user = losses_B[:ROWS], losses_B[ROWS:]
        weights_B = self.scheduler.weights(self.row_ids_B)
        torch.autograd.backward(bds_objective(alignment, user, weights_B))
        self._update()
        self.scheduler.step(self.row_ids_B, user)

    def step_flop_share(self) -> float:
        """Multiplications per row of a response-only step over those of a full-logits step."""
        head: int = self.model.get_output_embeddings().weight.numel()
        config = self.model.config
        matrices: int = sum(
            p.numel()
            for name, p in self.model.named_parameters()
            if p.dim() == 2 and p.shape[0] != config.vocab_size
        )
        return (matrices + head * SUPERVISED_TOKENS / TOKENS) / (matrices + head)

    def _own_loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            use_cache=False,
        ).loss
        return loss

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _batch(self, generator: torch.Generator) -> Batch:
        vocabulary = self.model.config.vocab_size
        input_ids_BT = torch.randint(3, vocabulary, (ROWS, TOKENS), generator=generator)
        labels_BT = input_ids_BT.clone()
        labels_BT[:, :-SUPERVISED_TOKENS] = -100
        return Batch(input_ids_BT, torch.ones_like(input_ids_BT), labels_BT)


def run(
    output_dir: Path, model_path: str | None = None, rounds: int = 5
) -> list[dict[str, str | float]]:
    """Measures, prints and writes output_dir/bds_step.json; returns what it wrote."""
    memory = {name: _peak_memory(name, model_path) for name in ("plain", "bds")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = Steps(model_path)
    ways: dict[str, Callable[[], None]] = {
        "plain": steps.plain,
        "bds": steps.bds,
        "separate": steps.separate,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.process_time()
            way()
            seconds[name].append(time.process_time() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    share = steps.step_flop_share()
    torch.set_num_threads(threads)

    results = [
        _result(
            "bds step / plain LoRA step",
            median["bds"] / median["plain"],
            2.1,
            f"2.0: twice the rows ({2 * share:.2f} with the vocabulary projection on "
            f"{SUPERVISED_TOKENS} of {TOKENS} positions)",
            "CPU seconds/CPU seconds, one thread",
        ),
        _result(
            "bds step / two plain passes",
            median["bds"] / median["separate"],
            0.95,
            f"{share:.2f} of the multiplications: same rows, vocabulary projection on "
            f"{SUPERVISED_TOKENS} of {TOKENS} positions; its softmax shrinks alike",
            "CPU seconds/CPU seconds, one thread",
        ),
        _result(
            "peak memory of a bds run / of a plain LoRA run",
            memory["bds"] / memory["plain"],
            1.3,
            "1.0 where weights outweigh activations; 2.0 where activations do: twice the rows",
            "bytes/bytes",
        ),
    ]
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "bds_step.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, value in median.items():
        print(f"{name:9} {value:7.3f} CPU s/step, median of {rounds}")
    for name, value in memory.items():
        print(f"{name:9} {value / 1e6:7.0f} MB peak")
    for result in results:
        print(f"{result['name']}: {result['ratio']:.3f} (target <= {result['target']})")
    return results


def _result(
    name: str, ratio: float, target: float, limit: str, unit: str
) -> dict[str, str | float]:
    return {
        "name": name,
        "ratio": round(ratio, 4),
        "target": target,
        "better": "lower",
        "limit": limit,
        "unit": unit,
        "machine": f"{platform.machine()}, torch {torch.__version__}",
    }


def _peak_memory(way: str, model_path: str | None) -> float:
    """Peak resident bytes of a fresh process that only takes steps of one kind."""
    command = [sys.executable, "-m", "benchmarks.bds_step", "--peak-memory", way]
    if model_path:
        command += ["--model", model_path]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(answer.stdout.split()[-1])


def _print_peak_memory(way: str, model_path: str | None) -> None:
    step = getattr(Steps(model_path), way)
    for _ in range(MEMORY_STEPS):
        step()
    print(_own_peak_bytes())


def _own_peak_bytes() -> int:
    # Linux hands a parent's ru_maxrss on to the programs it starts; VmHWM begins with the program.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of a causal model; default: random SmolLM2-135M")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-memory", choices=["plain", "bds"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory:
        _print_peak_memory(arguments.peak_memory, arguments.model)
    else:
        run(arguments.output, arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
