"""How every speed benchmark measures: CPU seconds in interleaved rounds, peak memory of a fresh
process, and one record a ratio."""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

RESULTS = Path(__file__).parent / "results"
CPU_SECONDS = "CPU seconds/CPU seconds, one thread"
BYTES = "bytes/bytes"

Result = dict[str, str | float | bool | None]


@contextmanager
def one_thread() -> Iterator[None]:
    """CPU seconds of several threads depend on how long they waited for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process, so that other work on the machine does not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


def median_cpu_seconds(
    ways: Mapping[str, Callable[[], object]], rounds: int, *, warm: bool = True
) -> dict[str, float]:
    """Each way once a round, in turn, so that a slow minute meets all of them; medians over the
    rounds. warm: one uncounted call of each first."""
    if warm:
        for way in ways.values():
            way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(cpu_seconds(way))
    return {name: statistics.median(values) for name, values in seconds.items()}


def in_fresh_process(module: str, *arguments: str) -> dict[str, float]:
    """The JSON object that `python -m module arguments` prints on its last line.

    Freed tensors go back to the system at once there: otherwise a peak says more about holes in the
    heap than about what was held (a joint Panacea step: 20 % instead of 1 % over a plain one).
    """
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def peak_bytes() -> int:
    """Most memory this process ever held."""
    # Linux hands a parent's ru_maxrss on to the programs it starts; VmHWM begins with the program.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def result(
    name: str,
    ratio: float,
    target: float | None,
    limit: str,
    *,
    better: Literal["lower", "higher"] = "lower",
    unit: str = CPU_SECONDS,
) -> Result:
    """One line of a results file. target None: for information."""
    return {
        "name": name,
        "ratio": round(ratio, 4),
        "target": target,
        "better": better,
        "met": target is None or (ratio <= target if better == "lower" else ratio >= target),
        "limit": limit,
        "unit": unit,
        "machine": f"{platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def publish(output_dir: Path, name: str, results: Sequence[Result]) -> None:
    """Write output_dir/name.json and print every ratio with its target and limit."""
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / f"{name}.json").write_text(json.dumps(list(results), indent=2) + "\n")
    for line in results:
        sign = "<=" if line["better"] == "lower" else ">="
        target = "for information" if line["target"] is None else f"target {sign} {line['target']}"
        missed = "" if line["met"] else "  MISSED"
        print(f"{line['name']}: {line['ratio']:.3f} ({target}){missed}\n    limit {line['limit']}")


def print_raw(values: Mapping[str, float], unit: str, scale: float = 1.0) -> None:
    for name, value in values.items():
        print(f"    {name:28} {value * scale:10.3f} {unit}")


def answer(values: Mapping[str, Any]) -> None:
    """What in_fresh_process reads."""
    print(json.dumps(dict(values)))
