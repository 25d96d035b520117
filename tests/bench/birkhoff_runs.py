"""Helpers of the benchmark scripts. They run the real program and read the files it writes."""

import json
import os
import pathlib
import random
import re
import statistics
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIRKHOFF = os.environ.get("BIRKHOFF", str(ROOT / "build/cpu/birkhoff"))
WORK = pathlib.Path(os.environ.get("BIRKHOFF_BENCH", str(ROOT / "build/bench")))


def clean_environment(threads=None):
    """The environment without variables that a Python installation of torch may have added."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def birkhoff(*arguments, threads=None, check=True, program=BIRKHOFF):
    """Runs one command of the program; returns its standard output."""
    done = subprocess.run([program, *map(str, arguments)],
                          capture_output=True,
                          text=True,
                          env=clean_environment(threads))
    if check and done.returncode != 0:
        raise SystemExit(
            f"birkhoff {' '.join(map(str, arguments))}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def title():
    """First line of a report, as `birkhoff bench` prints it: version, CPU, cores, instruction set,
    command line."""
    version = birkhoff("--version").splitlines()[0]
    names = [
        line.split(":", 1)[1].strip()
        for line in open("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    command = " ".join([str(pathlib.Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
    cpu = f"{names[0] if names else 'unnamed CPU'}, {os.cpu_count()} cores, {instruction_set()}"
    return f"{version}; {cpu}; `python {command}`"


def prepare(folder, text, tokenizer="chars", valid=0.1):
    """A corpus of one text, made only if it is missing."""
    folder = pathlib.Path(folder)
    if not (folder / "manifest.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        birkhoff("prepare", "--out", folder, "--tokenizer", tokenizer, "--valid", valid, text)
    return folder


def train(config, run, settings=(), ranks=None, threads=None, resume=False):
    """A training run; returns its metrics as a list of objects. It starts in a new folder, or with
    `resume` continues the run of an interrupted script."""
    if not resume:
        subprocess.run(["rm", "-rf", str(run)], check=True)
    pathlib.Path(run).parent.mkdir(parents=True, exist_ok=True)
    arguments = ["train", config, "--run", run]
    for setting in settings:
        arguments += ["--set", setting]
    if ranks:
        arguments += ["--ranks", ranks]
    birkhoff(*arguments, threads=threads)
    return metrics(run)


def train_resumably(config, folder, name, settings=(), threads=None):
    """A training run in FOLDER/run-NAME-COMMIT, which an interrupted script continues; with
    uncommitted changes it starts from scratch. Returns the folder of the run and its metrics."""
    run = pathlib.Path(folder) / f"run-{name}-{commit()}"
    return run, train(config, run, [*settings, "watchdog.seconds=600"], threads=threads,
                      resume=commit() is not None)


def commit():
    """The commit of the tree; None with uncommitted changes."""
    name = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT,
                          capture_output=True, text=True, check=True).stdout.strip()
    return None if name.endswith("-dirty") else name


def kept(folder, name, compute):
    """The result of compute(), which is kept as FOLDER/NAME-COMMIT.json and not computed again at
    this commit. With uncommitted changes it is computed each time."""
    if commit() is None:
        return compute()
    file = pathlib.Path(folder) / f"{name}-{commit()}.json"
    if not file.exists():
        found = compute()
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.rename(file)
    return json.loads(file.read_text())


def metrics(run):
    with open(pathlib.Path(run) / "metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def training_speed(rows, skip=2):
    """Median tokens/s of the training lines, without the first ones (warm-up)."""
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return statistics.median(speeds[skip:])


def read_safetensors(path):
    """Name -> (dtype, shape, bytes) of one safetensors file, using only the standard library."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    base = 8 + length
    return {
        name: (entry["dtype"], entry["shape"],
               data[base + entry["data_offsets"][0]:base + entry["data_offsets"][1]]
              ) for name, entry in header.items()
    }


def newest_checkpoint(run):
    return sorted((pathlib.Path(run) / "checkpoints").glob("step-*"))[-1]


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .\n"


def random_text(symbols, separator, count):
    """A text of `count` symbols, each of them at least once."""
    draw = random.Random(1)
    return separator.join([*symbols, *draw.choices(symbols, k=count - len(symbols))])


def random_corpus(words=None, tree=ROOT):
    """A corpus of random tokens, made only if it is missing: of `words` different words, or of
    letters, prepared by the program of `tree`. Its text is in the same folder."""
    folder = WORK / f"random_{words or 'letters'}{'' if tree == ROOT else '_' + tree.name}"
    if not (folder / "corpus/manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = random_text([f"w{i}" for i in range(words - 1)], " ",
                           1 << 22) if words else random_text(LETTERS, "", 1 << 20)
        (folder / "text.txt").write_text(text)
        kind = ["words", "--vocab-size", words] if words else ["chars"]
        birkhoff("prepare", "--out", folder / "corpus", "--tokenizer", *kind, "--valid", 0.01,
                 folder / "text.txt",
                 program=BIRKHOFF if tree == ROOT else tree / "build/cpu/birkhoff")
    return folder / "corpus"


def shakespeare():
    """Path of tinyshakespeare as plain text; BIRKHOFF_DATA names the folder that holds
    tinyshakespeare.txt.gz."""
    import gzip

    text = WORK / "tinyshakespeare.txt"
    if not text.exists():
        source = os.environ.get("BIRKHOFF_DATA")
        if not source:
            raise SystemExit(
                "set BIRKHOFF_DATA to the folder that holds tinyshakespeare.txt.gz "
                "(karpathy/char-rnn, data/tinyshakespeare)"
            )
        WORK.mkdir(parents=True, exist_ok=True)
        text.write_bytes(
            gzip.decompress((pathlib.Path(source) / "tinyshakespeare.txt.gz").read_bytes()))
    return text


def build(tree, *targets):
    """Builds targets of a work tree with the LibTorch that this one is configured with; the log is
    in build/."""
    cache = ROOT / "build/cpu/CMakeCache.txt"
    if not cache.exists():
        raise SystemExit(f"{cache} is missing: run ./bootstrap.sh build first")
    torch = re.search(r"^BIRKHOFF_TORCH:PATH=(.*)$", cache.read_text(), re.MULTILINE)[1]
    log = ROOT / "build/build_commit.log"
    with open(log, "w") as out:
        for command in (["cmake", "--preset", "cpu", f"-DBIRKHOFF_TORCH:PATH={torch}"],
                        ["cmake", "--build", "--preset", "cpu", "--target", *targets]):
            if subprocess.run(command, cwd=tree, stdout=out, stderr=subprocess.STDOUT).returncode:
                raise SystemExit(f"'{' '.join(command)}' failed in {tree}; see {log}")


def build_commit(commit, *targets):
    """Builds targets of another commit in a work tree below build/; returns the commit's short hash
    and the tree."""
    sha = subprocess.run(["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
                         cwd=ROOT,
                         capture_output=True,
                         text=True).stdout.strip()
    if not sha:
        raise SystemExit(
            f"no commit '{commit}' here; give a commit, branch or tag of this repository")
    tree = ROOT / f"build/trees/{sha[:12]}"
    if not tree.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach",
                        str(tree), sha],
                       cwd=ROOT,
                       check=True)
    build(tree, *targets)
    return sha[:12], tree


def instruction_set():
    """The instruction set that our loops use here, as BIRKHOFF_CPU names it: that variable, or the
    widest set of the CPU."""
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "").split()
    names = {
        "amx_bf16": "amx_bf16",
        "avx512_bf16": "avx512_bf16",
        "avx512dq": "avx512",
        "avx2": "avx2"
    }
    return os.environ.get("BIRKHOFF_CPU") or next(
        (name for flag, name in names.items() if flag in flags), "portable")
