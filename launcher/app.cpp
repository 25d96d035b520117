#include "launcher/app.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cluster/base/error.h"
#include "configs/config_io.h"
#include "launcher/commands.h"
#include "launcher/failure.h"

namespace birkhoff {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 done, 2 usage, 3 configuration, 4 data, 5 checkpoint, 6 storage, 7 a rank was "
    "lost,\n"
    "8 hang, 9 non-finite numbers, 10 memory, 75 saved: run the same command again. "
    "docs/runbook.md says more.";

// All verbs and what they were given. Lives as long as the parse.
struct CommandLine {
  CLI::App app{"Birkhoff trains Transformers with sparse and doubly stochastic attention.",
               "birkhoff"};
  PrepareArguments prepare;
  TrainArguments train;
  EvalArguments eval;
  SampleArguments sample;
  InspectArguments inspect;
  BenchLoaderArguments bench_loader;
  BenchCommArguments bench_comm;
  BenchStepArguments bench_step;
  BenchAttentionArguments bench_attention;
  std::string verify_path;
  std::string config_file, config_before, config_after;
  std::vector<std::string> config_settings;

  CommandLine() {
    app.set_version_flag("--version", version_text());
    app.require_subcommand(1);
    app.footer(kFooter);
    add_prepare();
    add_train();
    add_eval();
    add_sample();
    add_inspect();
    add_config();
    add_bench();
  }

  CLI::App* verb(CLI::App& parent, const char* name, const char* what, const char* examples) {
    CLI::App* command = parent.add_subcommand(name, what);
    command->footer(std::string("Examples:\n") + examples);
    return command;
  }

  void add_settings(CLI::App* command, std::vector<std::string>& settings) {
    command
        ->add_option("--set", settings,
                     "path=value: override one field; may be repeated, the last one wins")
        ->allow_extra_args(false)
        ->type_name("PATH=VALUE");
  }

  void add_prepare() {
    CLI::App* c =
        verb(app, "prepare", "Make a corpus folder from text",
             "  birkhoff prepare --out corpus/shakespeare --tokenizer chars shakespeare.txt\n"
             "  zcat news.gz | birkhoff prepare --out corpus/news --tokenizer sentencepiece "
             "--vocab-size 8000 -");
    c->add_option("--out", prepare.out, "corpus folder to make")->required()->type_name("DIR");
    c->add_option(
         "--tokenizer", prepare.tokenizer,
         "bytes, chars, words, sentencepiece (trains a model), or a SentencePiece model file")
        ->capture_default_str();
    c->add_option("--vocab-size", prepare.vocabulary, "number of ids, for words and sentencepiece")
        ->check(CLI::Range(std::int64_t{2}, std::int64_t{10'000'000}));
    c->add_option("--valid", prepare.valid, "fraction held out for validation")
        ->check(CLI::Range(0.0, 0.9))
        ->capture_default_str();
    c->add_option("--test", prepare.test, "fraction held out for the test split")
        ->check(CLI::Range(0.0, 0.9))
        ->capture_default_str();
    c->add_option("PATH", prepare.paths, "files, folders, or - for standard input")->required();
  }

  void add_train() {
    CLI::App* c =
        verb(app, "train", "Train a model; the same command again resumes",
             "  birkhoff train configs/quickstart.txtpb --run run/first --ranks 2\n"
             "  srun --mpi=pmix birkhoff train my.txtpb --run run/big --set train.steps=20000");
    c->add_option("CONFIG", train.config, "configuration (.txtpb)")->required();
    c->add_option("--run", train.run, "run folder: made if new, resumed if not")
        ->required()
        ->type_name("DIR");
    c->add_option("--ranks", train.ranks, "start this many MPI ranks here and supervise them")
        ->check(CLI::Range(1, 4096));
    add_settings(c, train.settings);
    c->add_flag("--fresh", train.fresh, "set aside what the run folder holds and start anew");
  }

  void add_device(CLI::App* c, std::string& device) {
    c->add_option("--device", device, "cpu or cuda, whatever the run trained on")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
  }

  void add_eval() {
    CLI::App* c = verb(app, "eval", "Loss and bits per byte of a checkpoint",
                       "  birkhoff eval run/first\n"
                       "  birkhoff eval run/first/checkpoints/step-00001000 --split test --json");
    c->add_option("PATH", eval.path, "run folder (its newest checkpoint) or checkpoint")
        ->required();
    c->add_option("--corpus", eval.corpus, "corpus folder; default: the run's own")
        ->type_name("DIR");
    c->add_option("--split", eval.split, "valid or test")
        ->check(CLI::IsMember({"valid", "test"}))
        ->capture_default_str();
    add_device(c, eval.device);
    c->add_flag("--json", eval.json, "print one JSON object");
  }

  void add_sample() {
    CLI::App* c = verb(app, "sample", "Generate text from a checkpoint",
                       "  birkhoff sample run/first --prompt 'ROMEO:'\n"
                       "  birkhoff sample run/first --prompt 'int ' --tokens 500 --temperature 0.8 "
                       "--top-k 40 --seed 7");
    c->add_option("PATH", sample.path, "run folder (its newest checkpoint) or checkpoint")
        ->required();
    c->add_option("--prompt", sample.prompt, "text to continue")->required()->type_name("TEXT");
    c->add_option("--tokens", sample.tokens, "tokens to generate")
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{10'000'000}))
        ->capture_default_str();
    c->add_option("--temperature", sample.temperature, "0 takes the likeliest token")
        ->check(CLI::Range(0.0, 100.0))
        ->capture_default_str();
    c->add_option("--top-k", sample.top_k, "choose among the k likeliest tokens; 0 = all")
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{10'000'000}))
        ->capture_default_str();
    c->add_option("--seed", sample.seed, "same seed, same text")
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 62))
        ->capture_default_str();
    add_device(c, sample.device);
  }

  void add_inspect() {
    CLI::App* c = verb(app, "inspect", "Say what a corpus, run or checkpoint holds",
                       "  birkhoff inspect corpus/shakespeare --bigram\n"
                       "  birkhoff inspect run/first");
    c->add_option("PATH", inspect.path, "corpus folder, run folder or checkpoint")->required();
    c->add_flag("--bigram", inspect.bigram,
                "of a corpus: also the held-out bits per byte of a bigram model");
    CLI::App* v =
        verb(app, "verify", "Re-read every byte of a corpus, run or checkpoint against its hashes",
             "  birkhoff verify run/first\n"
             "  birkhoff verify corpus/shakespeare");
    v->add_option("PATH", verify_path, "corpus folder, run folder or checkpoint")->required();
  }

  void add_config() {
    CLI::App* c = verb(app, "config", "Print, compare and document configurations",
                       "  birkhoff config print configs/quickstart.txtpb --set train.steps=50\n"
                       "  birkhoff config diff a.txtpb b.txtpb");
    c->require_subcommand(1);
    CLI::App* print = verb(*c, "print", "The resolved configuration, every field set",
                           "  birkhoff config print configs/quickstart.txtpb\n"
                           "  birkhoff config print my.txtpb --set model.layers=8");
    print->add_option("CONFIG", config_file, "configuration (.txtpb)")->required();
    add_settings(print, config_settings);
    CLI::App* diff = verb(*c, "diff", "Fields in which two configurations differ",
                          "  birkhoff config diff a.txtpb b.txtpb\n"
                          "  birkhoff config diff run/first/config.txtpb my.txtpb");
    diff->add_option("BEFORE", config_before, "configuration (.txtpb)")->required();
    diff->add_option("AFTER", config_after, "configuration (.txtpb)")->required();
    verb(*c, "reference", "Every field with type, default and meaning, as Markdown",
         "  birkhoff config reference\n"
         "  birkhoff config reference > docs/configuration.md");
  }

  void add_bench() {
    CLI::App* c = verb(app, "bench", "Measure a part, beside its floor and its peer",
                       "  birkhoff bench step configs/baby_gpt_dense.txtpb\n"
                       "  birkhoff bench attention sinkhorn --lengths 1024,4096\n"
                       "  birkhoff bench comm --ranks 2");
    c->require_subcommand(1);
    CLI::App* step = verb(
        *c, "step",
        "A training step on synthetic tokens, one process: first its loss and gradients against "
        "fp64, then\nits time beside the model's FLOPs at the speed of at::mm. Its peer, "
        "PyTorch's eager GPT, is measured\nin turns with it by tests/bench/step_speed.py.",
        "  birkhoff bench step configs/baby_gpt_dense.txtpb\n"
        "  birkhoff bench step my.txtpb --set train.precision=bf16 --vocabulary 32000");
    step->add_option("CONFIG", bench_step.config, "configuration (.txtpb)")->required();
    add_settings(step, bench_step.settings);
    step->add_option("--steps", bench_step.steps, "steps that are measured")
        ->check(CLI::Range(1, 1'000'000))
        ->capture_default_str();
    step->add_option("--vocabulary", bench_step.vocabulary, "ids that tokens are drawn from")
        ->check(CLI::Range(std::int64_t{2}, std::int64_t{10'000'000}))
        ->capture_default_str();
    step->add_flag("--profile", bench_step.profile, "also where the time goes by operation");

    add_bench_attention(*c);

    CLI::App* comm = verb(
        *c, "comm",
        "Collective operations between ranks: first their results, then time, nccl-tests' algbw "
        "and busbw,\nbeside a memcpy of the same bytes (CPU) and the same operations by MPI "
        "(CPU) or NCCL (GPU).",
        "  birkhoff bench comm --ranks 2\n"
        "  srun --mpi=pmix -n 8 birkhoff bench comm --device cuda --bytes 1M-1G");
    comm->add_option("--ranks", bench_comm.ranks, "start this many MPI ranks here")
        ->check(CLI::Range(2, 4096));
    comm->add_option("--device", bench_comm.device, "cpu, or cuda: a GPU for each rank")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    comm->add_option("--bytes", bench_comm.bytes, "sizes, each four times the one before")
        ->type_name("MIN-MAX")
        ->capture_default_str();
    add_rounds(comm, bench_comm.rounds);

    CLI::App* loader =
        verb(*c, "loader",
             "The training loader: first its tokens, then speed beside a plain pread loop, and its "
             "start-up on\n10^12 tokens. The corpus is read once before.",
             "  birkhoff bench loader\n"
             "  birkhoff bench loader corpus/mine --rounds 50");
    loader->add_option("CORPUS", bench_loader.corpus,
                       "corpus folder; default: 64 MB of random bytes in a temporary folder");
    add_rounds(loader, bench_loader.rounds);
  }

  void add_bench_attention(CLI::App& bench) {
    BenchAttentionArguments& a = bench_attention;
    CLI::App* c = verb(
        bench, "attention",
        "Attention alone, synthetic inputs, one process: first its output and gradients against "
        "fp64, then time\nand memory beside the machine's limits, LibTorch's operations for the "
        "same mechanism (composed of its\nfused ones, and eager), and its dense attention. Peers "
        "in Python: tests/bench/attention_peers.py.",
        "  birkhoff bench attention\n"
        "  birkhoff bench attention dense 'sinkhorn { block: 128 iterations: 8 }' --lengths "
        "1024,4096\n"
        "  birkhoff bench attention sinkhorn --device cuda --dtype bf16 --heads 16 --svg time.svg");
    c->add_option("MECHANISM", a.mechanisms,
                  "names of mechanisms of docs/configuration.md, or their text")
        ->capture_default_str();
    const auto size = [&](const char* name, std::int64_t& value, std::int64_t most,
                          const char* what) {
      c->add_option(name, value, what)
          ->check(CLI::Range(std::int64_t{1}, most))
          ->capture_default_str();
    };
    c->add_option("--lengths", a.lengths, "tokens of a sequence, one or several: 1024,4096")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
        ->capture_default_str();
    size("--batch", a.batch, 1 << 20, "sequences");
    size("--heads", a.heads, 65536, "heads");
    size("--head-dim", a.head_dim, 65536, "numbers of a head's queries, keys and values");
    c->add_option("--dtype", a.dtype, "of queries, keys and values: fp32, fp64, bf16 or fp16")
        ->check(CLI::IsMember({"fp32", "fp64", "bf16", "fp16"}))
        ->capture_default_str();
    c->add_flag("--encoder", a.encoder, "queries see later keys too");
    c->add_flag("--library-defaults", a.library_defaults,
                "on a CPU: LibTorch and the allocator as they come, not as training sets them");
    c->add_option("--device", a.device, "cpu or cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    c->add_flag("--recorded", a.recorded,
                "on a GPU: all contenders launched as CUDA graphs, as train.cuda_graph does");
    add_rounds(c, a.rounds);
    c->add_option("--svg", a.svg, "file for a plot of time against length");
    c->add_option("--table", a.table, "file for what is printed");
  }

  void add_rounds(CLI::App* command, int& rounds) {
    command->add_option("--rounds", rounds, "interleaved rounds, of which medians are taken")
        ->check(CLI::Range(1, 100'000))
        ->capture_default_str();
  }

  int run_bench(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
    CLI::App* bench = app.get_subcommand("bench");
    bench_loader.line = bench_comm.line = bench_step.line = bench_attention.line = arguments;
    if (bench->got_subcommand("loader")) return bench_loader_command(bench_loader, out);
    if (bench->got_subcommand("comm")) return bench_comm_command(bench_comm, out, err);
    if (bench->got_subcommand("attention")) return bench_attention_command(bench_attention, out);
    return bench_step_command(bench_step, out);
  }

  int run(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
    if (app.got_subcommand("prepare")) return prepare_command(prepare, out, err);
    if (app.got_subcommand("train")) return train_command(train, out, err);
    if (app.got_subcommand("eval")) return eval_command(eval, out, err);
    if (app.got_subcommand("sample")) return sample_command(sample, out, err);
    if (app.got_subcommand("inspect")) return inspect_command(inspect, out, err);
    if (app.got_subcommand("verify")) return verify_command(verify_path, out, err);
    if (app.got_subcommand("bench")) return run_bench(arguments, out, err);
    CLI::App* config = app.get_subcommand("config");
    if (config->got_subcommand("print"))
      return config_print_command(config_file, config_settings, out);
    if (config->got_subcommand("diff"))
      return config_diff_command(config_before, config_after, out);
    return config_reference_command(out);
  }
};

std::vector<std::string> verb_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

const CLI::App* find_verb(const CLI::App& app, const std::string& name) {
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

// The deepest verb that the arguments name, for its list of options.
const CLI::App& chosen_verb(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* chosen = &app;
  for (const std::string& argument : arguments) {
    if (const CLI::App* next = find_verb(*chosen, argument)) chosen = next;
  }
  return *chosen;
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

// One line for a command line that does not parse, with the nearest option or verb.
std::string usage_line(const CLI::App& app, const std::vector<std::string>& arguments,
                       const CLI::ParseError& error) {
  const CLI::App& verb = chosen_verb(app, arguments);
  const std::string what = error.what();
  std::string hint;
  std::vector<std::string> options;
  for (const CLI::Option* option : verb.get_options()) {
    if (!option->get_lnames().empty()) options.push_back("--" + option->get_lnames().front());
  }
  for (const std::string& argument : arguments) {
    if (argument.rfind("--", 0) != 0) continue;
    const std::string name = argument.substr(0, argument.find('='));
    if (std::find(options.begin(), options.end(), name) != options.end()) continue;
    if (std::string near = nearest_name(name, options); !near.empty())
      hint = " ('" + name + "' is no option; did you mean '" + near + "'?)";
  }
  const auto set = std::find(arguments.begin(), arguments.end(), "--set");
  if (hint.empty() && set != arguments.end() && set + 1 != arguments.end() &&
      (set + 1)->find('=') == std::string::npos) {
    hint = " (--set takes one word: PATH=VALUE)";
  }
  std::string name;
  for (const CLI::App* part = &verb; part != nullptr; part = part->get_parent()) {
    name = part->get_name() + (name.empty() ? "" : " ") + name;
  }
  return what + hint + "; see '" + name + " --help'";
}

// What was printed counts only once it is out: a full disk behind standard output must not pass for
// success.
void flush_output(std::ostream& out) {
  out.flush();
  if (!out)
    fail(ExitCode::kStorage,
         "standard output cannot be written: {}; free space there or write elsewhere",
         std::strerror(errno));
}

// A line about the first word that should name a verb and does not; empty if there is none. CLI11
// would only say that one is missing.
std::string unknown_verb(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* parent = &app;
  for (const std::string& argument : arguments) {
    if (parent->get_subcommands({}).empty()) return "";
    const CLI::App* next = find_verb(*parent, argument);
    if (next == nullptr) {
      std::vector<std::string> known = verb_names(*parent);
      const bool option = argument.rfind('-', 0) == 0;
      if (option) known = {"--help", "--version"};
      if (argument == "-h" || std::find(known.begin(), known.end(), argument) != known.end())
        return "";
      const std::string near = nearest_name(argument, known);
      return std::string("unknown ") + (option ? "option" : "command") + " '" + argument + "'" +
             (near.empty() ? "" : "; did you mean '" + near + "'?") +
             " (commands: " + join(verb_names(*parent)) + "); see 'birkhoff" +
             (parent == &app ? "" : " " + parent->get_name()) + " --help'";
    }
    parent = next;
  }
  return "";
}

}  // namespace

int run_app(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
  const auto say = [&err](const std::string& what, ExitCode code) {
    err << "birkhoff: " << one_line(what) << '\n';
    err.flush();
    return static_cast<int>(code);
  };
  try {
    CommandLine line;
    if (arguments.empty()) {
      err << line.app.help();
      return static_cast<int>(ExitCode::kUsage);
    }
    if (const std::string unknown = unknown_verb(line.app, arguments); !unknown.empty())
      return say(unknown, ExitCode::kUsage);
    try {
      std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
      line.app.parse(reversed);
    } catch (const CLI::Success& request) {  // --help, --version
      line.app.exit(request, out, out);
      flush_output(out);
      return 0;
    } catch (const CLI::ParseError& error) {
      return say(usage_line(line.app, arguments, error), ExitCode::kUsage);
    }
    const int code = line.run(arguments, out, err);
    flush_output(out);
    return code;
  } catch (...) {
    const Failure failure = describe_failure(std::current_exception());
    return say(failure.what, failure.code);
  }
}

}  // namespace birkhoff
