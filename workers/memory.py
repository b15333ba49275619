"""Whether the kernel ended a process for memory: its counters, read before and after."""

import re
from contextlib import suppress
from pathlib import Path

_TRACES = re.compile(
    r"MemoryError|DefaultCPUAllocator|CUDA out of memory|OutOfMemoryError|Cannot allocate memory"
    r"|std::bad_alloc"
)


def oom_kills(root: Path = Path("/")) -> int | None:
    """How often the out-of-memory killer has struck in our control group; None: not known.

    Reads cgroup v2 (`memory.events`), else v1 (`memory.oom_control`), else the machine's own count
    (`/proc/vmstat`).
    """
    for path in _counter_files(root):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return None


def _counter_files(root: Path) -> list[Path]:
    files: list[Path] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            hierarchy, controllers, group = line.split(":", 2)
            inside = group.strip("/")
            if hierarchy == "0":
                files.append(root / "sys/fs/cgroup" / inside / "memory.events")
                files.append(root / "sys/fs/cgroup/memory.events")
            elif "memory" in controllers.split(","):
                files.append(root / "sys/fs/cgroup/memory" / inside / "memory.oom_control")
                files.append(root / "sys/fs/cgroup/memory/memory.oom_control")
    return [*files, root / "proc/vmstat"]


def ran_out_of_memory(
    exit_code: int, log_tail: str, kills_before: int | None, kills_after: int | None
) -> bool:
    """Whether a crash was one of memory: killed while the kernel's count rose, or its own words."""
    if _TRACES.search(log_tail):
        return True
    if exit_code != -9 or kills_before is None or kills_after is None:
        return False
    return kills_after > kills_before
