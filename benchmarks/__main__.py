"""All benchmarks that need no GPU, one after another: `make bench`."""

import subprocess
import sys

BENCHMARKS = (
    "bds_step",
    "panacea_step",
    "trainers",
    "generation",
    "embedded_scorer",
    "diversity",
    "privacy",
    "attribution",
    "dp_step",
    "job_creation",
)

if __name__ == "__main__":
    codes = [
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        for name in BENCHMARKS
    ]
    sys.exit(max(codes))
