"""``make fuzz``: every reader of bytes, guided by coverage, then bodies and schema with many examples.

Each reader has a process of its own, for libFuzzer ends it at the first defect; the others go on. The input is kept.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from random import Random

from fuzz_target import DefectError
from fuzz_targets import TARGETS

HERE = Path(__file__).parent
EXAMPLES_PER_MINUTE = 400


def main() -> None:
    arguments = _arguments()
    kept = Path(arguments.artifacts)
    kept.mkdir(parents=True, exist_ok=True)
    names = arguments.targets or list(TARGETS)
    seconds = max(2, int(arguments.minutes * 60 * (1 if arguments.targets else 0.6) / len(names)))
    guided = _guided()
    how = "by coverage" if guided else "by seed alone: atheris is not installed (pip install 'warmroot[fuzz]')"
    print(f"seed {arguments.seed}; {len(names)} readers of bytes, {seconds} s each, guided {how}", flush=True)
    fuzz_one = _with_atheris if guided else _by_seed
    failed = [name for name in names if not fuzz_one(name, arguments.seed, seconds, kept)]
    if not arguments.targets and not _examples(arguments.minutes * 0.4):
        failed.append("bodies and schema")
    print(f"defects in: {', '.join(failed)}; inputs are in {kept}" if failed else "no defect")
    sys.exit(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of all together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 2**31))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, metavar="NAME", help=f"only {', '.join(TARGETS)}")
    parser.add_argument("--artifacts", default="build/fuzz", help="folder of the inputs that found something")
    return parser.parse_args()


def _guided() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def _with_atheris(name: str, seed: int, seconds: int, kept: Path) -> bool:
    flags = [f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=4096", f"-artifact_prefix={kept}/{name}-"]
    corpus = kept / f"corpus-{name}"
    corpus.mkdir(exist_ok=True)
    for number, data in zip(range(len(TARGETS[name].seeds())), TARGETS[name].inputs(Random(seed)), strict=False):
        (corpus / f"seed-{number}").write_bytes(data)
    command = [sys.executable, str(HERE / "guided.py"), name, str(seed), *flags, str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = done.stderr.splitlines()
    runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
    covered = next((line for line in reversed(lines) if " cov: " in line), "").partition(" cov: ")[2].split(" ")[0]
    print(f"  {name}: {runs} inputs, {covered or '?'} edges{'' if not done.returncode else ', DEFECT'}", flush=True)
    if done.returncode:
        print("\n".join(line for line in [*done.stdout.splitlines(), *lines] if "Error" in line)[:2000])
    return not done.returncode


def _by_seed(name: str, seed: int, seconds: int, kept: Path) -> bool:
    end = time.monotonic() + seconds
    for number, data in zip(count(1), TARGETS[name].inputs(Random(seed)), strict=False):
        try:
            TARGETS[name].check(data)
        except DefectError as defect:
            (kept / f"{name}-{number}").write_bytes(data)
            print(f"  {name}: DEFECT after {number} inputs: {defect}")
            return False
        if time.monotonic() > end:
            print(f"  {name}: {number} inputs", flush=True)
            return True
    return True


def _examples(minutes: float) -> bool:
    """Bodies and schema with fresh examples, which hypothesis makes smaller where they find something."""
    examples = max(20, int(EXAMPLES_PER_MINUTE * minutes))
    environ = {**os.environ, "WARMROOT_FUZZ_EXAMPLES": str(examples)}
    tests = [str(HERE / f"test_fuzz_{name}.py") for name in ("bodies", "schema", "channel")]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "timeout=7200", *tests]
    return subprocess.run(command, env=environ, check=False).returncode == 0


if __name__ == "__main__":
    main()
