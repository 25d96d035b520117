// The subcommands for Slurm: submit, status, tail, cancel.
#include "launcher/command_line.h"

namespace birkhoff {

void CommandLine::add_submit() {
  CLI::App* c = subcommand(
      app_, "submit", "Queue a run in Slurm, in jobs that save before they end and continue it",
      "  birkhoff submit big.txtpb --run run/big --site my_site.txtpb --nodes 4\n"
      "  birkhoff submit big.txtpb --run run/big --site my_site.txtpb --nodes 5 --spare-nodes 1 "
      "--time 2-00:00:00\n"
      "  birkhoff submit big.txtpb --run run/rates --site my_site.txtpb --sweep "
      "train.schedule.learning_rate=1e-3,3e-4\n"
      "  birkhoff submit big.txtpb --run run/big --site my_site.txtpb --dry-run");
  c->add_option("CONFIG", submit_.config, "configuration (.txtpb)")->required();
  c->add_option("--run", submit_.run,
                "run folder: created if new, resumed otherwise; what belongs to the jobs goes to "
                "RUN.slurm")
      ->required()
      ->type_name("RUN");
  c->add_option("--site", submit_.site, "site profile (.txtpb), such as configs/sites/*.txtpb")
      ->required()
      ->type_name("FILE");
  c->add_option("--exclude-file", submit_.exclude_file,
                "file of hosts that jobs must not get, as `doctor --exclude-file` writes it")
      ->type_name("FILE");
  c->add_option("--nodes", submit_.nodes, "nodes of a job")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  c->add_option("--time", submit_.time, "time limit of a job; default: the profile's")
      ->type_name("D-HH:MM:SS");
  c->add_option("--restarts", submit_.restarts,
                "if ranks are lost or hang, start them again in the same job, so often without a "
                "new checkpoint")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  c->add_option("--spare-nodes", submit_.spare_nodes,
                "leave so many of the nodes free until others are lost")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  c->add_option("--least-ranks", submit_.least_ranks,
                "go on with so many ranks if nodes are lost; default: all")
      ->check(CLI::Range(1, 4096));
  add_settings(c, submit_.settings);
  c->add_flag("--fresh", submit_.fresh,
              "move the contents of the run folder aside, now, and start again");
  c->add_option("--chain", submit_.chain,
                "queue so many jobs, each of which continues the run when the one before has ended")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  c->add_option("--sweep", submit_.sweep,
                "one run for each value, in RUN/value, as the elements of an array job")
      ->type_name("PATH=VALUE,VALUE,...");
  c->add_option("--name", submit_.name, "name of the job; default: that of the run folder");
  c->add_flag("--dry-run", submit_.dry_run, "check, print the batch script, and queue nothing");
}

void CommandLine::add_looks() {
  CLI::App* status =
      subcommand(app_, "status",
                 "Tell how far a run is, what happened to it, and which of its jobs are queued",
                 "  birkhoff status run/big\n"
                 "  birkhoff status run/big --json");
  status->add_option("RUN", status_.run, "run folder, or the folder of a sweep")->required();
  status->add_flag("--json", status_.json, "print one JSON object for each run");
  CLI::App* tail =
      subcommand(app_, "tail", "Print what a run's jobs print and its metrics, until it ends",
                 "  birkhoff tail run/big\n"
                 "  birkhoff tail run/big --lines 100 --no-follow");
  tail->add_option("RUN", tail_.run, "run folder")->required();
  tail->add_option("--lines", tail_.lines,
                   "start with so many lines of the newest output and of "
                   "the metrics")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  tail->add_flag("!--no-follow", tail_.follow, "print these lines, and end");
  CLI::App* cancel = subcommand(app_, "cancel",
                                "Remove a run's jobs from the queue; the one that runs saves first",
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
