"""The scaling laboratory: steps of a configuration on several hosts, which tests/hosts/host_cluster
makes on this machine (needs root and iproute2), with links of a given speed. For each row it prints
the time of a step, the bytes that leave and enter a host, the exposed communication and its bound,
and what the simulator of `birkhoff plan` predicts.

    python tests/bench/scaling_lab.py                    # 10 configurations against the simulator
    python tests/bench/scaling_lab.py --overlap          # two real ranks and a slow link
    python tests/bench/scaling_lab.py --hosts 2 --ranks 2 --rate 200mbit --set mesh.tensor=2

The computation of a step is a timed wait, as long as one rank alone takes (`birkhoff bench comm
CONFIG`), because ranks outnumber cores. First the latency and the bandwidth of the links are
measured, for each number of hosts and of a host's data-parallel ranks: of one step with next to no
computation. Ranks with a group of their own across hosts (mesh.zero_inside_nodes) fill a link
better, so it is measured again for them. The simulator gets these numbers and nothing else. Bytes
are the difference of the interface counters between a run of few rounds and one of many.

--overlap trains for real, on two hosts of one rank, over a link so slow that the gradients take
twice the backward pass. The bound: forward pass + bytes / bandwidth + update.
"""

import argparse
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile

import birkhoff_runs as runs

CLUSTER = runs.ROOT / "tests/hosts/host_cluster"
MODEL = [
    "model.layers=6", "model.channels=384", "model.heads=6", "data.sequence_length=256",
    "train.global_batch=16"
]
ENDLESS_GBS = 1e6  # bytes take no time
# Hosts, ranks on each, rate of a link, settings.
CONFIGURATIONS = [
    (2, 1, "400mbit", []),
    (2, 1, "100mbit", ["train.zero_stage=1"]),
    (2, 2, "400mbit", []),
    (2, 2, "400mbit", ["mesh.ranks_per_node=2"]),
    (2, 2, "200mbit", ["mesh.tensor=2"]),
    (2, 2, "200mbit", ["mesh.tensor=2", "train.zero_stage=3"]),
    (4, 1, "400mbit", ["train.zero_stage=3"]),
    (4, 2, "400mbit", ["mesh.ranks_per_node=2"]),
    (4, 2, "200mbit", ["mesh.ranks_per_node=2", "mesh.zero_inside_nodes=true",
                       "train.zero_stage=3"]),
    (4, 4, "400mbit", ["mesh.ranks_per_node=4"]),
]


def bits_per_second(rate):
    number, unit = re.fullmatch(r"([0-9.]+)([kmg])bit", rate).groups()
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


class Hosts:
    """Hosts that end with this object, and links of the given rate."""

    def __init__(self, hosts, rate, microseconds=0, lost=0):
        self.folder = pathlib.Path(tempfile.mkdtemp()) / "hosts"
        self.hosts = hosts
        self.call("start", hosts, microseconds, lost)
        self.call("shape", rate)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call("stop")
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def call(self, command, *arguments, env=None):
        done = subprocess.run([CLUSTER, command, self.folder, *map(str, arguments)],
                              capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise SystemExit(f"host_cluster {command}: {done.stderr}")
        return done.stdout

    def counters(self):
        """Bytes received and sent, of each host."""
        return [tuple(map(int, self.call("counters", host + 1).split()))
                for host in range(self.hosts)]

    def run(self, ranks, *arguments):
        """`birkhoff ARGUMENTS` on `ranks` ranks of each host; returns its output."""
        file = self.folder.parent / "hostfile"
        file.write_text("".join(f"node{host + 1} slots={ranks}\n" for host in range(self.hosts)))
        environment = runs.clean_environment(threads=1) | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_orte_default_hostfile": str(file)
        }
        return self.call("run", 1, runs.BIRKHOFF, *arguments, env=environment)


def seconds_of_all_reduce(hosts, ranks, sizes):
    """By bytes, from `bench comm`."""
    lines = hosts.run(ranks, "bench", "comm", "--ranks", hosts.hosts * ranks, "--bytes", sizes,
                      "--rounds", 5)
    rows = [line.split("|")[1:-1] for line in lines.splitlines() if line.startswith("| all_reduce")]
    return {int(row[1]): float(row[2]) * 1e-6 for row in rows}


def link_of(hosts, ranks, rate, settings):
    """What the speed of a link depends on: among them how many ranks of a data axis a host has, and
    whether each of them has a group of its own across hosts."""
    tensor = next((int(each.split("=")[1]) for each in settings if "mesh.tensor" in each), 1)
    return hosts, ranks // tensor, rate, "mesh.zero_inside_nodes=true" in settings


class Laboratory:
    """Measures each kind of link once: GB/s in each direction, and the latency of a phase in
    microseconds."""

    def __init__(self, a):
        self.a = a
        self.between = {}
        with Hosts(1, "1gbit") as host:
            seconds = seconds_of_all_reduce(host, 2, "1K-4M")
        small, large = min(seconds), max(seconds)
        # A small tensor is sent whole in one phase; of a large one, each of two phases sends half.
        self.inside = (large / (seconds[large] - 2 * seconds[small]) / 1e9, seconds[small] * 1e6)
        print("\nMeasured first, for the simulator:\n")
        print("| link | data-parallel ranks on a host | GB/s | latency, us |\n|---|---:|---:|---:|")
        print(f"| inside a host | 2 | {self.inside[0]:.4g} | {self.inside[1]:.4g} |", flush=True)

    def measure(self, link):
        """The bandwidth is that with which the simulator is right for a step with next to no
        computation."""
        if link in self.between:
            return
        hosts, ranks, rate, own_groups = link
        settings = ["data.sequence_length=16", f"train.global_batch={hosts * ranks}",
                    f"mesh.ranks_per_node={ranks if ranks > 1 else 0}"]
        if own_groups:
            settings += ["mesh.zero_inside_nodes=true", "train.zero_stage=3"]
        with Hosts(hosts, rate, self.a.latency, self.a.lost) as cluster:
            latency = min(seconds_of_all_reduce(cluster, ranks, "1K-1K").values())
            self.between[link] = (ENDLESS_GBS, latency * 1e6)
            result, _ = self.replay(cluster, ranks, rate, settings, 9)
        sent = ranks * sum(group["planned_bytes_to_other_nodes"]
                           for group in result["groups"].values())
        seconds = result["step_seconds"] - result["simulated_seconds"]
        if seconds <= 0:
            raise SystemExit(f"{link}: a step takes no longer than its latency: link too fast")
        gbs = sent / seconds / 1e9
        self.between[link] = (gbs, latency * 1e6)
        groups = ", a group a rank" if own_groups else ""
        print(f"| between {hosts} hosts, {rate}{groups} | {ranks} | {gbs:.4g} | "
              f"{latency * 1e6:.4g} |", flush=True)

    def replay(self, cluster, ranks, rate, settings, rounds):
        """What `bench comm CONFIG` reports, and how many bytes came into and went out of each
        host."""
        arguments = ["bench", "comm", self.a.config, "--ranks", cluster.hosts * ranks, "--json",
                     "--rounds", rounds]
        links = (*self.inside,
                 *self.between.get(link_of(cluster.hosts, ranks, rate, settings), ()))
        for name, value in zip(("--node-gbs", "--node-us", "--network-gbs", "--network-us"), links):
            arguments += [name, f"{value:.6g}"]
        for setting in [*self.a.model, *settings]:
            arguments += ["--set", setting]
        before = cluster.counters()
        result = json.loads(cluster.run(ranks, *arguments))
        moved = [(end[0] - begin[0], end[1] - begin[1])
                 for begin, end in zip(before, cluster.counters())]
        return result, moved

    def row(self, hosts, ranks, rate, settings):
        few, many = 1, 1 + self.a.rounds
        with Hosts(hosts, rate, self.a.latency, self.a.lost) as cluster:
            _, moved_in_few = self.replay(cluster, ranks, rate, settings, few)
            result, moved = self.replay(cluster, ranks, rate, settings, many)
        per_step = [[(b - a) / (many - few) for a, b in zip(one, other)]
                    for one, other in zip(moved_in_few, moved)]
        into = statistics.mean(each[0] for each in per_step)
        out_of = statistics.mean(each[1] for each in per_step)
        planned = ranks * sum(group["planned_bytes_to_other_nodes"]
                              for group in result["groups"].values())
        step, computation = result["step_seconds"], result["computation_seconds"]
        bound = max(computation, planned / (bits_per_second(rate) / 8))
        ratio = f"{out_of / planned:.4f}" if planned else ""
        print(f"| {hosts} x {ranks} | {rate} | {' '.join(settings)} | {step * 1e3:.1f} | "
              f"{computation * 1e3:.1f} | {(step - computation) * 1e3:.1f} | {bound * 1e3:.1f} | "
              f"{out_of / 1e6:.2f} | {into / 1e6:.2f} | {ratio} | "
              f"{result['simulated_seconds'] * 1e3:.1f} | "
              f"{result['simulated_seconds'] / step:.3f} |", flush=True)

    def rows(self, configurations):
        for hosts, ranks, rate, settings in configurations:
            if hosts > 1:
                self.measure(link_of(hosts, ranks, rate, settings))
        print("\nComputation is a timed wait. Times in ms, medians of "
              f"{1 + self.a.rounds} steps; MB of a host in a step, by its interface, and of the "
              "outgoing ones the ratio to the planned payload; the bound is the larger of "
              "computation and payload / link.\n")
        print("| hosts x ranks | link | settings | step | computation | exposed | bound | MB out | "
              "MB in | out / payload | simulated | simulated / step |")
        print("|---|---|---|" + "---:|" * 9, flush=True)
        for configuration in configurations:
            self.row(*configuration)

    def overlap(self):
        """Two hosts of one rank train; the link takes twice the backward pass for the gradients."""
        settings = ["mesh.data=2"]
        with Hosts(2, "1gbit") as hosts:
            alone, _ = self.replay(hosts, 1, "1gbit", settings, 1)
        size = alone["groups"]["data"]["planned_bytes"]
        rate = f"{size * 8 / (2 * alone['backward_seconds']) / 1e6:.1f}mbit"
        update = alone["computation_seconds"] - alone["forward_seconds"] - alone["backward_seconds"]
        bound = alone["forward_seconds"] + size / (bits_per_second(rate) / 8) + update
        corpus = runs.random_corpus()
        run = runs.WORK / "scaling_overlap"
        subprocess.run(["rm", "-rf", str(run)], check=True)
        arguments = ["train", self.a.config, "--run", run, "--ranks", 2]
        for setting in [*self.a.model, *settings, f"data.corpus={corpus}", "train.steps=20",
                        "metrics.every=1", "checkpoint.every=0", "evaluate.sequences=1"]:
            arguments += ["--set", setting]
        with Hosts(2, rate, self.a.latency, self.a.lost) as hosts:
            hosts.run(1, *arguments)
        rows = [row for row in runs.metrics(run) if "tokens_per_second" in row]
        step = statistics.median(16 * 256 / row["tokens_per_second"] for row in rows[3:])
        sending = size / (bits_per_second(rate) / 8)
        print(f"\nTwo hosts of one rank, {rate}: {size / 1e6:.1f} MB of gradients. Step "
              f"{step * 1e3:.0f} ms; forward {alone['forward_seconds'] * 1e3:.0f} + bytes / "
              f"bandwidth {sending * 1e3:.0f} + update {update * 1e3:.0f} = {bound * 1e3:.0f} ms; "
              f"ratio {step / bound:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(runs.ROOT / "configs/quickstart.txtpb"))
    parser.add_argument("--hosts", type=int, help="one row, on this many hosts")
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--latency", type=float, default=0, help="microseconds from host to host")
    parser.add_argument("--lost", type=float, default=0, help="share of frames that are lost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--overlap", action="store_true", help="train for real over a slow link")
    a = parser.parse_args()
    a.model = MODEL
    if not a.hosts and (a.settings or a.ranks != 1):
        parser.error("--ranks and --set are for one row: add --hosts")
    print(runs.title())
    laboratory = Laboratory(a)
    if a.overlap:
        laboratory.overlap()
    elif a.hosts:
        laboratory.rows([(a.hosts, a.ranks, a.rate, a.settings)])
    else:
        laboratory.rows(CONFIGURATIONS)


if __name__ == "__main__":
    main()
