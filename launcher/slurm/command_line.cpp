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
  add_number(c, "--nodes", submit_.nodes, 1, 65536, "number of nodes per job");
  c->add_option("--time", submit_.time, "time limit per job; default: the site profile's")
      ->type_name("D-HH:MM:SS");
  add_number(c, "--restarts", submit_.restarts, 0, 1'000'000,
             "restart lost or hung ranks in the same job, at most N times in a row without a "
             "new checkpoint");
  add_number(c, "--spare-nodes", submit_.spare_nodes, 0, 65536,
             "keep N of the nodes as spares for lost ones");
  add_number(c, "--min-ranks", submit_.min_ranks, 1, 4096,
             "minimum number of ranks to continue with after losing nodes; default: all");
  c->add_option("--least-ranks", submit_.min_ranks)->group("");  // its former name, not shown
  add_settings(c, submit_.settings);
  c->add_flag("--fresh", submit_.fresh,
              "move the old contents of the run folder to RUN/before-fresh-K now, and start over");
  add_number(c, "--chain", submit_.chain, 1, 1000,
             "submit a chain of N jobs, each resuming when the previous one ends");
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
  add_number(tail, "--lines", tail_.lines, 0, 1'000'000,
             "start with the last N lines of the newest output and of the metrics");
  tail->add_flag_callback(
      "--no-follow", [this] { tail_.follow = false; }, "print these lines and exit");
  CLI::App* cancel =
      subcommand(app_, "cancel", "Remove a run's jobs from the queue; a running job saves first",
                 "  birkhoff cancel run/big\n"
                 "  birkhoff cancel run/rates/1e-3");
  cancel->add_option("RUN", cancel_run_, "run folder, or the folder of a sweep")->required();
}

}  // namespace birkhoff
