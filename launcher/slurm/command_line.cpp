// The subcommands for Slurm: submit, status, tail, cancel.
#include "launcher/command_line.h"

namespace birkhoff {

void CommandLine::add_submit() {
  CLI::App* c = subcommand(
      app_, "submit",
      "Submit a run to Slurm; its jobs checkpoint before the time limit and requeue",
      "  birkhoff submit big.txtpb --run run/big --site my_site.txtpb --nodes 4\n"
      "  birkhoff submit big.txtpb --run run/big --site my_site.txtpb --nodes 5 --spare-nodes 1 "
      "--time 2-00:00:00\n"
      "  birkhoff submit big.txtpb --run run/rates --site my_site.txtpb --sweep "
      "train.schedule.learning_rate=1e-3,3e-4\n"
      "  birkhoff submit big.txtpb --run run/big --site my_site.txtpb --dry-run");
  c->add_option("CONFIG", submit_.config, "configuration (.txtpb)")->required();
  c->add_option(
       "--run", submit_.run,
       "run folder: created if new, resumed otherwise; job scripts and outputs go to RUN.slurm")
      ->required()
      ->type_name("RUN");
  c->add_option("--site", submit_.site, "site profile (.txtpb), such as configs/sites/*.txtpb")
      ->required()
      ->type_name("FILE");
  c->add_option("--exclude-file", submit_.exclude_file,
                "file of hosts to avoid, as written by `doctor --exclude-file`")
      ->type_name("FILE");
  c->add_option("--nodes", submit_.nodes, "number of nodes per job")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  c->add_option("--time", submit_.time, "time limit per job; default: the site profile's")
      ->type_name("D-HH:MM:SS");
  c->add_option("--restarts", submit_.restarts,
                "restart lost or hung ranks in the same job, at most N times in a row without a "
                "new checkpoint")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  c->add_option("--spare-nodes", submit_.spare_nodes, "keep N of the nodes as spares for lost ones")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  c->add_option("--min-ranks", submit_.min_ranks,
                "minimum number of ranks to continue with after losing nodes; default: all")
      ->check(CLI::Range(1, 4096));
  c->add_option("--least-ranks", submit_.min_ranks)->group("");  // its former name, not shown
  add_settings(c, submit_.settings);
  c->add_flag("--fresh", submit_.fresh,
              "move the old contents of the run folder to RUN/before-fresh-K now, and start over");
  c->add_option("--chain", submit_.chain,
                "submit a chain of N jobs, each resuming when the previous one ends")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  c->add_option("--sweep", submit_.sweep, "submit one run per value, in RUN/VALUE, as an array job")
      ->type_name("PATH=VALUE,VALUE,...");
  c->add_option("--name", submit_.name, "job name; default: the run folder's name");
  c->add_flag("--dry-run", submit_.dry_run,
              "check and print the batch script without submitting it");
}

void CommandLine::add_looks() {
  CLI::App* status = subcommand(app_, "status", "Show a run's progress, history and queued jobs",
                                "  birkhoff status run/big\n"
                                "  birkhoff status run/big --json");
  status->add_option("RUN", status_.run, "run folder, or the folder of a sweep")->required();
  status->add_flag("--json", status_.json, "print one JSON object per run");
  CLI::App* tail =
      subcommand(app_, "tail", "Follow the job output and metrics of a run until it ends",
                 "  birkhoff tail run/big\n"
                 "  birkhoff tail run/big --lines 100 --no-follow");
  tail->add_option("RUN", tail_.run, "run folder")->required();
  tail->add_option("--lines", tail_.lines,
                   "start with the last N lines of the newest output and of the metrics")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  tail->add_flag_callback(
      "--no-follow", [this] { tail_.follow = false; }, "print these lines and exit");
  CLI::App* cancel =
      subcommand(app_, "cancel", "Remove a run's jobs from the queue; a running job saves first",
                 "  birkhoff cancel run/big\n"
                 "  birkhoff cancel run/rates/1e-3");
  cancel->add_option("RUN", cancel_run_, "run folder, or the folder of a sweep")->required();
}

int CommandLine::run_slurm(std::ostream& out, std::ostream& err) {
  if (app_.got_subcommand("submit")) return submit_command(submit_, out, err);
  if (app_.got_subcommand("status")) return status_command(status_, out, err);
  if (app_.got_subcommand("tail")) return tail_command(tail_, out, err);
  return cancel_command(cancel_run_, out, err);
}

}  // namespace birkhoff
