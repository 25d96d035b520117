#include "launcher/command_line.h"

#include <tuple>

#include "launcher/app.h"

namespace birkhoff {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 done, 1 internal error, 2 usage, 3 configuration, 4 data, 5 checkpoint, "
    "6 storage,\n"
    "7 a rank was lost, 8 hang, 9 non-finite values, ranks that differ or no convergence, 10 "
    "memory,\n"
    "75 saved: run the same command again. See docs/runbook.md.";

// ranks: the option --ranks.
void add_launch(CLI::App* c, CLI::Option* ranks, LaunchOptions& launch) {
  c->add_option("--launcher", launch.launcher,
                "in a Slurm job: program that starts the ranks on its nodes; default: srun")
      ->check(CLI::IsMember({"srun", "mpirun"}))
      ->needs(ranks);
  c->add_option("--container", launch.container,
                "run the ranks with the birkhoff program in this Apptainer image; default: this "
                "program")
      ->type_name("IMAGE")
      ->needs(ranks);
  add_number(c, "--launch-seconds", launch.launch_seconds, 1, 86400,
             "seconds for all ranks to start; after that, their launcher is ended")
      ->needs(ranks);
}

}  // namespace

CommandLine::CommandLine() {
  app_.set_version_flag("--version", version_text());
  app_.require_subcommand(1);
  app_.footer(kFooter);
  add_prepare();
  add_train();
  add_plan();
  add_doctor();
  add_eval();
  add_sample();
  add_generate();
  add_score();
  add_bleu();
  add_average();
  add_export();
  add_classify();
  add_inspect();
  add_runs();
  add_compare();
  add_analyse();
  add_verify();
  add_config();
  add_transport();
  add_submit();
  add_looks();
  add_bench();
}

CLI::App* CommandLine::subcommand(CLI::App& parent, const char* name, const char* what,
                                  const char* examples) {
  CLI::App* command = parent.add_subcommand(name, what);
  command->footer(std::string("Examples:\n") + examples);
  return command;
}

CLI::Option* CommandLine::add_settings(CLI::App* command, std::vector<std::string>& settings) {
  return command
      ->add_option("--set", settings,
                   "override a field of the configuration; may be repeated, the last value wins")
      ->allow_extra_args(false)
      ->type_name("PATH=VALUE");
}

void CommandLine::add_train() {
  CLI::App* c =
      subcommand(app_, "train", "Train a model; run the same command again to resume",
                 "  birkhoff train configs/quickstart.txtpb --run run/first --ranks 2 --set "
                 "data.corpus=corpus/shakespeare\n"
                 "  srun --mpi=pmix birkhoff train my.txtpb --run run/big --set train.steps=20000");
  c->add_option("CONFIG", train_.config, "configuration (.txtpb)")->required();
  c->add_option("--run", train_.run, "run folder: created if new, resumed otherwise")
      ->required()
      ->type_name("DIR");
  CLI::Option* ranks = add_number(c, "--ranks", train_.ranks, 1, 4096,
                                  "start this many MPI ranks here and supervise them");
  add_number(c, "--restarts", train_.restarts, 0, 1'000'000,
             "restart lost or hung ranks, at most N times in a row without a new checkpoint")
      ->needs(ranks);
  add_number(c, "--spare-nodes", train_.spare_nodes, 0, 65536,
             "in a Slurm job: keep N nodes as spares for lost ones")
      ->needs(ranks);
  add_number(c, "--min-ranks", train_.min_ranks, 1, 4096,
             "in a Slurm job: minimum number of ranks to continue with after losing nodes; "
             "default: --ranks")
      ->needs(ranks);
  c->add_option("--least-ranks", train_.min_ranks)->group("");  // its former name, not shown
  add_launch(c, ranks, train_.launch);
  add_settings(c, train_.settings);
  c->add_flag("--fresh", train_.fresh,
              "move the old contents of the run folder to RUN/before-fresh-K and start over");
}

void CommandLine::add_links(CLI::App* command, LinkArguments& links, CLI::Option* needed) {
  CLI::Option* network = add_number(command, "--network-gbs", links.network_gbs, 1e-6, 1e6,
                                    "per-node network bandwidth in GB/s, each way");
  add_number(command, "--network-us", links.network_us, 0.0, 1e6,
             "latency of the network in microseconds")
      ->needs(network);
  CLI::Option* node = add_number(command, "--node-gbs", links.node_gbs, 1e-6, 1e6,
                                 "bandwidth of a rank inside its node in GB/s, each way");
  add_number(command, "--node-us", links.node_us, 0.0, 1e6, "latency inside a node in microseconds")
      ->needs(node);
  if (needed == nullptr) return;
  network->needs(needed);
  node->needs(needed);
}

void CommandLine::add_plan() {
  CLI::App* c = subcommand(
      app_, "plan",
      "Predict memory, communication, checkpoint size, speed and goodput of a run (docs/plan.md)",
      "  birkhoff plan my.txtpb --ranks 8 --vocabulary 32000\n"
      "  birkhoff plan my.txtpb --ranks 16 --ranks-per-node 8 --peak-tflops 400 --network-gbs 100\n"
      "  birkhoff plan my.txtpb --measure --faults-per-day 0.5 --save-seconds 2 "
      "--restart-seconds 90");
  c->add_option("CONFIG", plan_.config, "configuration (.txtpb)")->required();
  add_settings(c, plan_.settings);
  add_number(c, "--vocabulary", plan_.vocabulary, 2, 10'000'000,
             "number of token ids; default: the corpus'");
  add_number(c, "--ranks", plan_.ranks, 1, 4096, "number of ranks; default: mesh.data, else 1");
  add_number(c, "--ranks-per-node", plan_.ranks_per_node, 1, 4096,
             "ranks on each node; default: all");
  CLI::Option* peak = add_number(c, "--peak-tflops", plan_.peak_tflops, 1e-6, 1e6,
                                 "sustained TFLOP/s per rank, to bound the step time from below");
  c->add_flag("--measure", plan_.measure,
              "benchmark this machine (about a minute) and predict the step time on it")
      ->excludes(peak);
  add_links(c, plan_.links);
  CLI::Option* faults = add_number(
      c, "--faults-per-day", plan_.faults_per_day, 0.0, 86400.0,
      "failures of the whole job per day, to predict goodput: the share of time spent in steps "
      "that count");
  add_number(c, "--save-seconds", plan_.save_seconds, 0.0, 86400.0,
             "how long a save stalls training, in seconds")
      ->needs(faults);
  add_number(c, "--restart-seconds", plan_.restart_seconds, 0.0, 86400.0,
             "recovery time: from a failure to the next training step, in seconds")
      ->needs(faults);
  c->add_flag("--json", plan_.json, "print one JSON object, in bytes, FLOPs and seconds");
}

void CommandLine::add_doctor() {
  CLI::App* c = subcommand(
      app_, "doctor",
      "Check the ranks, their hosts and their files before training, in at most a minute",
      "  birkhoff doctor my.txtpb --run run/big --ranks 8\n"
      "  srun --mpi=pmix birkhoff doctor my.txtpb --run run/big --exclude-file bad-hosts\n"
      "  birkhoff doctor --ranks 2 --no-speed --json report.json");
  c->add_option("CONFIG", doctor_.config, "configuration (.txtpb) to train; default: none");
  c->add_option("--run", doctor_.run, "run folder to train in; may be missing")->type_name("DIR");
  add_settings(c, doctor_.settings);
  CLI::Option* ranks = add_number(c, "--ranks", doctor_.ranks, 1, 4096,
                                  "start this many MPI ranks here, as train does");
  add_launch(c, ranks, doctor_.launch);
  c->add_flag("--no-speed", doctor_.no_speed, "skip the speed checks");
  c->add_option("--json", doctor_.json, "file for the report as JSON (see docs/doctor.md)")
      ->type_name("FILE");
  c->add_option("--exclude-file", doctor_.exclude_file,
                "append the hosts that fail to this file, one per line")
      ->type_name("FILE");
}

CLI::Option* CommandLine::add_device(CLI::App* c, std::string& device, const char* what) {
  return c->add_option("--device", device, what)
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
}

void CommandLine::add_tensor(CLI::App* c, int& tensor, const char* what) {
  add_number(c, "--tensor", tensor, 1, 4096, what);
}

void CommandLine::add_eval() {
  CLI::App* c =
      subcommand(app_, "eval", "Compute loss, bits per byte and perplexity of a checkpoint",
                 "  birkhoff eval run/first\n"
                 "  birkhoff eval run/first --text letter.txt\n"
                 "  srun --mpi=pmix birkhoff eval run/big --device cuda --tensor 4\n"
                 "  birkhoff eval run/first/checkpoints/step-00001000 --split test --json");
  c->add_option("PATH", eval_.path, "run folder (its newest checkpoint) or checkpoint")->required();
  CLI::Option* corpus =
      c->add_option("--corpus", eval_.corpus, "corpus folder; default: the run's own")
          ->type_name("DIR");
  CLI::Option* split = c->add_option("--split", eval_.split, "valid or test")
                           ->check(CLI::IsMember({"valid", "test"}))
                           ->capture_default_str();
  c->add_option("--text", eval_.text, "evaluate on this whole text; - for standard input")
      ->type_name("FILE")
      ->excludes(corpus)
      ->excludes(split);
  add_number(c, "--sequences", eval_.sequences, 0, 1'000'000'000'000,
             "number of sequences to read, from the start of the split or text; 0 = all");
  c->add_option("--documents", eval_.documents,
                "also write a line of JSON with the loss of each document to this file")
      ->type_name("FILE");
  add_device(c, eval_.device);
  add_settings(c, eval_.settings);
  add_number(c, "--ranks", eval_.ranks, 1, 4096,
             "start this many MPI ranks here and supervise them");
  add_tensor(c, eval_.tensor);
  c->add_flag("--json", eval_.json, "print one JSON object (see docs/evaluation.md)");
}

void CommandLine::add_sample() {
  CLI::App* c = subcommand(app_, "sample", "Generate text or images from a checkpoint",
                           "  birkhoff sample run/first --prompt 'ROMEO:'\n"
                           "  birkhoff sample run/first --prompt-file start.txt --tokens 500 "
                           "--temperature 0.8 --top-k 40 --top-p 0.95 --samples 3 --seed 7\n"
                           "  birkhoff sample run/pixels --png half.png --complete 0.5");
  c->add_option("PATH", sample_.path, "run folder (its newest checkpoint) or checkpoint")
      ->required();
  CLI::Option* prompt =
      c->add_option(
           "--prompt", sample_.prompt,
           "text to continue; empty: start a new document, if the model has an end-of-document id")
          ->type_name("TEXT");
  c->add_option("--prompt-file", sample_.prompt_file,
                "file with the text to continue, unchanged; - for standard input")
      ->type_name("FILE")
      ->excludes(prompt);
  CLI::Option* png = c->add_option("--png", sample_.png, "of a model of images: the file to write")
                         ->type_name("FILE")
                         ->excludes(prompt);
  CLI::Option* complete =
      add_number(c, "--complete", sample_.complete, 0.0, 1.0,
                 "share of each image that is given; the model continues images of --split")
          ->needs(png);
  c->add_option("--split", sample_.split, "the images to continue")
      ->capture_default_str()
      ->needs(complete);
  c->add_option("--corpus", sample_.corpus, "their corpus, if not the one trained on")
      ->needs(complete);
  c->callback([this, prompt] {
    if (prompt->empty() && sample_.prompt_file.empty() && sample_.png.empty())
      throw CLI::RequiredError("--prompt, --prompt-file or --png");
  });
  add_number(c, "--tokens", sample_.tokens, 1, 10'000'000, "number of tokens to generate (200)");
  add_number(c, "--samples", sample_.samples, 1, 1'000'000,
             "number of texts to generate, separated by a line of 15 hyphens, or of images");
  add_number(c, "--temperature", sample_.temperature, 0.0, 100.0,
             "sampling temperature; 0 always picks the most likely token (greedy)");
  add_number(c, "--top-k", sample_.top_k, 0, 10'000'000,
             "sample from the k most likely tokens; 0 = all");
  add_number(c, "--top-p", sample_.top_p, 0.0, 1.0,
             "of the top k, sample from the fewest whose probabilities add up to p; 1 = all");
  add_number(c, "--seed", sample_.seed, 0, std::int64_t{1} << 62,
             "the same seed gives the same texts; a larger --samples only adds texts");
  add_device(c, sample_.device);
  add_tensor(c, sample_.tensor, "start this many MPI ranks here and divide the model over them");
}

void CommandLine::add_classify() {
  CLI::App* c = subcommand(app_, "classify", "Print the most likely class of each text",
                           "  birkhoff classify run/sst2 reviews.txt\n"
                           "  cut -f 1 reviews.tsv | birkhoff classify run/sst2 - --json");
  c->add_option("PATH", classify_.path, "run folder (its newest checkpoint) or checkpoint")
      ->required();
  c->add_option("FILE", classify_.file, "file with one text per line, or - for standard input")
      ->required();
  c->add_flag("--json", classify_.json,
              "print one JSON object per text, with the probabilities of all classes");
  add_device(c, classify_.device);
}

void CommandLine::add_inspect() {
  CLI::App* c = subcommand(app_, "inspect", "Describe a corpus, run or checkpoint",
                           "  birkhoff inspect corpus/shakespeare --bigram\n"
                           "  birkhoff inspect run/first");
  c->add_option("PATH", inspect_.path, "corpus folder, run folder or checkpoint")->required();
  c->add_flag("--bigram", inspect_.bigram,
              "for a corpus: also print the held-out bits per byte of a bigram model");
}

void CommandLine::add_runs() {
  CLI::App* c = subcommand(app_, "runs", "List the runs in a folder: state, step, loss, speed",
                           "  birkhoff runs run\n"
                           "  birkhoff runs /scratch/sweep --json");
  c->add_option("DIR", runs_.folder, "folder to search for run folders, recursively")->required();
  c->add_flag("--json", runs_.json, "print one JSON object per run");
}

void CommandLine::add_compare() {
  CLI::App* c =
      subcommand(app_, "compare", "Plot the loss curves of runs and list their differences",
                 "  birkhoff compare run/dense run/sinkhorn\n"
                 "  birkhoff compare run/a run/b run/c --svg abc.svg");
  c->add_option("RUN", compare_.runs, "run folders, at least two")->required();
  c->add_option("--svg", compare_.svg, "file for the plot; an existing file is overwritten")
      ->capture_default_str()
      ->type_name("FILE");
}

void CommandLine::add_analyse() {
  CLI::App* c = subcommand(
      app_, "analyse",
      "Write a page about a model's attention to a text: maps, divergences, balance, rank "
      "(docs/analysis.md)",
      "  birkhoff analyse run/first --text letter.txt\n"
      "  birkhoff analyse run/seed1 run/seed2 run/seed3 --text letter.txt --html seeds.html\n"
      "  birkhoff analyse run/big --text letter.txt --layers 0,11 --heads 0,1 --tokens 512");
  c->add_option("RUN", analyse_.runs,
                "run folders (their newest checkpoints) or checkpoints; several, if they have the "
                "same layers and attention, give means and standard deviations")
      ->required();
  c->add_option("--text", analyse_.text, "text to read; - for standard input")
      ->required()
      ->type_name("FILE");
  c->add_option("--html", analyse_.html, "file for the page; an existing file is overwritten")
      ->capture_default_str()
      ->type_name("FILE");
  for (const auto& [name, indices, what] :
       {std::tuple{"--layers", &analyse_.layers, "layers whose maps to show, from 0: 0,11"},
        std::tuple{"--heads", &analyse_.heads, "heads whose maps to show, from 0"}}) {
    c->add_option(name, *indices, what)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20));
  }
  add_number(c, "--tokens", analyse_.tokens, 2, 4096,
             "number of tokens to read, from the start of the text; default: all, at most 256");
}

void CommandLine::add_verify() {
  CLI::App* c = subcommand(app_, "verify",
                           "Check every byte of a corpus, run or checkpoint against its hashes",
                           "  birkhoff verify run/first\n"
                           "  birkhoff verify corpus/shakespeare");
  c->add_option("PATH", verify_path_, "corpus folder, run folder or checkpoint")->required();
}

void CommandLine::add_config() {
  CLI::App* c = subcommand(app_, "config", "Print, compare and document configurations",
                           "  birkhoff config print configs/quickstart.txtpb --set train.steps=50\n"
                           "  birkhoff config diff a.txtpb b.txtpb");
  c->require_subcommand(1);
  CLI::App* print =
      subcommand(*c, "print", "Print the resolved configuration, with every field set",
                 "  birkhoff config print configs/quickstart.txtpb\n"
                 "  birkhoff config print my.txtpb --set model.layers=8");
  print->add_option("CONFIG", config_file_, "configuration (.txtpb)")->required();
  add_settings(print, config_settings_);
  CLI::App* diff = subcommand(*c, "diff", "List the fields in which two configurations differ",
                              "  birkhoff config diff a.txtpb b.txtpb\n"
                              "  birkhoff config diff run/first/config.txtpb my.txtpb");
  diff->add_option("BEFORE", config_before_, "configuration (.txtpb)")->required();
  diff->add_option("AFTER", config_after_, "configuration (.txtpb)")->required();
  subcommand(*c, "reference", "Print every field with type, default and meaning, as Markdown",
             "  birkhoff config reference\n"
             "  birkhoff config reference > docs/configuration.md");
}

void CommandLine::add_transport() {
  TransportArguments& a = transport_;
  CLI::App* c = subcommand(
      app_, "transport",
      "Solve an optimal transport problem, or sort values, with Sinkhorn's algorithm "
      "(docs/transport.md)",
      "  birkhoff transport --example factories --tolerance 1e-4\n"
      "  birkhoff transport --example assignment --reg 0.001 --eps-scaling --svg errors.svg\n"
      "  birkhoff transport --cost cost.csv --source supply.txt --target demand.txt --plan plan.tsv\n"
      "  birkhoff transport --sort values.txt --reg 0.01");
  c->add_option("--cost", a.cost,
                "cost matrix: a line of numbers per source, separated by commas, tabs or spaces")
      ->type_name("FILE");
  CLI::Option* from = c->add_option("--from", a.from,
                                    "source points: a line of coordinates each; with --to, costs "
                                    "are distances")
                          ->type_name("FILE");
  CLI::Option* to = c->add_option("--to", a.to, "target points")->type_name("FILE")->needs(from);
  from->needs(to);
  CLI::Option* sort =
      c->add_option("--sort", a.sort, "sort these values: transport them onto a line of positions")
          ->type_name("FILE");
  CLI::Option* example =
      c->add_option("--example", a.example,
                    "built-in problem: factories (5 factories supply 5 regions), assignment (a "
                    "permutation of least cost) or sorting")
          ->check(CLI::IsMember({"factories", "assignment", "sorting"}));
  c->add_flag("--squared", a.squared, "costs are squared distances of points")->needs(from);
  for (const auto& [name, file, what] :
       {std::tuple{"--source", &a.source, "mass of each source; default: equal, 1 in all"},
        std::tuple{"--target", &a.target, "mass of each target; default: equal, 1 in all"}}) {
    c->add_option(name, *file, what)->type_name("FILE")->excludes(sort)->excludes(example);
  }
  c->add_option(
       "--reg", a.regularization,
       "weight of the entropy term, above 0, in the unit of the costs; a smaller one gives "
       "a sharper plan and takes more iterations")
      ->capture_default_str();
  c->add_option("--tolerance", a.tolerance,
                "stop when each source sum is this close, as a share of the total mass")
      ->capture_default_str();
  add_number(c, "--iterations", a.max_iterations, 1, 10'000'000,
             "maximum number of iterations; reaching it ends with exit code 9");
  c->add_flag("--eps-scaling", a.scales,
              "first solve with larger regularizations, and halve them: fewer iterations for a "
              "small --reg");
  c->add_option("--plan", a.plan, "file for the plan, tab-separated, in full precision")
      ->type_name("FILE");
  c->add_option("--svg", a.svg, "file for a plot of the errors by iteration")->type_name("FILE");
}

int CommandLine::run(const std::vector<std::string>& arguments, std::ostream& out,
                     std::ostream& err) {
  if (app_.got_subcommand("prepare")) {
    take_prepare_order();
    return prepare_command(prepare_, out, err);
  }
  if (app_.got_subcommand("train")) return train_command(train_, out, err);
  if (app_.got_subcommand("plan")) return plan_command(plan_, out);
  if (app_.got_subcommand("doctor")) return doctor_command(doctor_, out, err);
  if (app_.got_subcommand("eval")) return eval_command(eval_, out, err);
  if (app_.got_subcommand("sample")) return sample_command(sample_, out, err);
  if (app_.got_subcommand("generate")) return generate_command(generate_, out, err);
  if (app_.got_subcommand("score")) return score_command(score_, out, err);
  if (app_.got_subcommand("bleu")) return bleu_command(bleu_, out);
  if (app_.got_subcommand("average")) return average_command(average_, out);
  if (app_.got_subcommand("export")) return export_command(export_, out);
  if (app_.got_subcommand("classify")) return classify_command(classify_, out, err);
  if (app_.got_subcommand("inspect")) return inspect_command(inspect_, out, err);
  if (app_.got_subcommand("runs")) return runs_command(runs_, out, err);
  if (app_.got_subcommand("compare")) return compare_command(compare_, out);
  if (app_.got_subcommand("verify")) return verify_command(verify_path_, out, err);
  if (app_.got_subcommand("analyse")) return analyse_command(analyse_, out, err);
  if (app_.got_subcommand("transport")) return transport_command(transport_, out);
  if (app_.got_subcommand("bench")) return run_bench(arguments, out, err);
  if (app_.got_subcommand("submit")) return submit_command(submit_, out, err);
  if (app_.got_subcommand("status")) return status_command(status_, out, err);
  if (app_.got_subcommand("tail")) return tail_command(tail_, out, err);
  if (app_.got_subcommand("cancel")) return cancel_command(cancel_run_, out, err);
  CLI::App* config = app_.get_subcommand("config");
  if (config->got_subcommand("print"))
    return config_print_command(config_file_, config_settings_, out, err);
  if (config->got_subcommand("diff"))
    return config_diff_command(config_before_, config_after_, out);
  return config_reference_command(out);
}

}  // namespace birkhoff
