// One function per subcommand. Each takes its parsed arguments, writes data to `out` and messages
// to `err`, and returns an exit code. Errors are thrown; app.cpp turns them into lines and exit
// codes.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "data/generate/generated_pairs.h"

namespace birkhoff {

struct PrepareArguments {
  std::string out;
  std::string tokenizer = "bytes";
  std::string like;             // run, checkpoint or corpus whose tokenizer to use; empty: none
  std::int64_t vocabulary = 0;  // 0: the tokenizer's own default
  bool lines = false;           // each line of a file is a document
  std::optional<std::string> separator, jsonl;  // between documents; the field of JSON Lines
  // Of pairs, whose sources are `texts`: the files of targets.
  std::vector<std::string> targets, valid_targets, test_targets;
  std::string source_tokenizer;  // of pairs; empty: sources have the tokenizer of targets
  // Of tables: a name, or a number from 1.
  std::optional<std::string> text_column, second_column, label_column;
  bool header = false;   // the first line of a table has names
  std::string generate;  // a task of GeneratedPairs, instead of an input
  GeneratedPairs generated;
  bool images = false;     // the input is images; the next two are only for them
  std::string image_size;  // N or ROWSxCOLUMNS; empty: as they are
  int channels = 0;        // 1 or 3; 0: as they are
  bool points = false;     // the input is point sets
  // The rest is for images and point sets.
  bool unlabeled = false, skip_damaged = false;
  std::optional<int> ranks;  // start this many ranks and supervise them
  // The values of PATH, --train, --valid and --test, in the order of the command line.
  struct Text {
    std::string option;  // "PATH", "--train", ...
    std::string value;
  };
  std::vector<Text> texts;
  std::vector<std::string> for_ranks;  // all arguments but `texts` and `ranks`, as they were given
};
int prepare_command(const PrepareArguments& arguments, std::ostream& out, std::ostream& err);

// The start of ranks by --ranks (launcher/processes/supervisor.h).
struct LaunchOptions {
  std::optional<std::string> launcher;  // in a Slurm job: srun or mpirun; not set: srun
  std::string container;     // Apptainer image whose birkhoff the ranks run; empty: this program
  int launch_seconds = 300;  // maximum time for the start of all ranks
};

struct TrainArguments {
  std::string config, run;
  std::optional<int> ranks;      // start mpirun with this many ranks and supervise it
  int restarts = 0;              // with `ranks`: maximum restarts in a row without a new save
  int spare_nodes = 0;           // of a Slurm job: spares for lost nodes
  std::optional<int> min_ranks;  // minimum after losing nodes; not set: `ranks`
  LaunchOptions launch;
  std::vector<std::string> settings;
  bool fresh = false;  // move the old contents of the run folder and start over
};
int train_command(const TrainArguments& arguments, std::ostream& out, std::ostream& err);

// Links between nodes (of a node) and inside them (of a rank), in each direction.
struct LinkArguments {
  std::optional<double> network_gbs, node_gbs;  // GB/s; not set: infinitely fast
  double network_us = 0, node_us = 0;           // latency in microseconds
};

struct PlanArguments {
  std::string config;
  std::vector<std::string> settings;
  std::optional<std::int64_t> vocabulary;    // not set: the corpus'
  std::optional<int> ranks, ranks_per_node;  // not set: mesh.data, and all ranks
  bool measure = false;
  std::optional<double> peak_tflops, faults_per_day;
  LinkArguments links;
  double save_seconds = 0, restart_seconds = 0;
  bool json = false;
};
int plan_command(const PlanArguments& arguments, std::ostream& out);

struct DoctorArguments {
  std::optional<std::string> config;
  std::string run;  // empty: no folder is tried
  std::vector<std::string> settings;
  std::optional<int> ranks;  // as TrainArguments::ranks
  LaunchOptions launch;
  bool no_speed = false;           // skip the speed checks
  std::string json, exclude_file;  // files to write; empty: none
};
int doctor_command(const DoctorArguments& arguments, std::ostream& out, std::ostream& err);

struct EvalArguments {
  std::string path, corpus, split = "valid", device = "cpu";
  std::int64_t sequences = 0;  // from the start of the split; 0: all
  std::string text;       // file to evaluate on, "-": standard input; empty: a split of a corpus
  std::string documents;  // file to write with the loss of each document; empty: none
  std::vector<std::string> settings;  // path=value, of evaluation-time fields
  std::optional<int> ranks;           // to start here; not set: those that a launcher started
  int tensor = 1;                     // ranks of a replica of the model
  bool json = false;
};
int eval_command(const EvalArguments& arguments, std::ostream& out, std::ostream& err);

struct SampleArguments {
  std::string path, device = "cpu";
  std::optional<std::string> prompt;  // the text to continue,
  std::string prompt_file;            // or the file that holds it; "-": standard input
  std::optional<std::int64_t> tokens;
  std::int64_t samples = 1;
  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::int64_t seed = 1;
  // Of models of images: the file to write, and the share of each image that is given, from the
  // start of a split of a corpus (empty: the one that the model was trained on).
  std::string png;
  std::optional<double> complete;
  std::string split = "valid", corpus;
  int tensor = 1;  // ranks of the model, which are started here unless a launcher did
};
int sample_command(const SampleArguments& arguments, std::ostream& out, std::ostream& err);

struct GenerateArguments {
  std::string path, device = "cpu";
  std::string input = "-", output = "-";  // files of lines; "-": standard input and output
  // Instead of an input: a split of a corpus of pairs (empty: the one that the model was trained
  // on), and the score to print: "bleu" or "exact_match"; empty: none.
  std::string split, corpus, score, tokenize = "13a";
  bool teacher_forced = false;  // of exact_match: each id after the true ones before it
  std::int64_t beam = 4;
  double length_penalty = 0.6, length_offset = 5;
  std::optional<double> temperature;  // set: sample instead of searching
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::int64_t seed = 1;
  std::optional<std::int64_t> max_tokens;
  std::int64_t batch = 64;   // lines at a time, at most
  bool json = false;         // one JSON object per line
  std::optional<int> ranks;  // as EvalArguments::ranks
  int tensor = 1;            // as EvalArguments::tensor
};
int generate_command(const GenerateArguments& arguments, std::ostream& out, std::ostream& err);

struct ScoreArguments {
  std::string path, device = "cpu";
  std::string input = "-";   // JSON Lines; "-": standard input
  std::optional<int> ranks;  // as EvalArguments::ranks
  int tensor = 1;            // as EvalArguments::tensor
};
int score_command(const ScoreArguments& arguments, std::ostream& out, std::ostream& err);

struct BleuArguments {
  std::string hypotheses;               // file with a segment per line, "-": standard input
  std::vector<std::string> references;  // files with the same number of lines
  std::string tokenize = "13a";         // bleu_tokenizer() (data/scores/bleu_words.h)
  bool json = false;
};
int bleu_command(const BleuArguments& arguments, std::ostream& out);

struct AverageArguments {
  std::string run, out;   // run folder; folder to make
  std::int64_t last = 5;  // number of checkpoints, the newest
};
int average_command(const AverageArguments& arguments, std::ostream& out);

struct ExportArguments {
  std::string path, out;  // run folder or checkpoint; folder to make
};
int export_command(const ExportArguments& arguments, std::ostream& out);

struct ClassifyArguments {
  std::string path, device = "cpu";
  std::string file;   // one text per line; "-": standard input
  bool json = false;  // one JSON object per text
};
int classify_command(const ClassifyArguments& arguments, std::ostream& out, std::ostream& err);

struct InspectArguments {
  std::string path;
  bool bigram = false;
};
int inspect_command(const InspectArguments& arguments, std::ostream& out, std::ostream& err);

struct RunsArguments {
  std::string folder;
  bool json = false;
};
int runs_command(const RunsArguments& arguments, std::ostream& out, std::ostream& err);

struct CompareArguments {
  std::vector<std::string> runs;
  std::string svg = "compare.svg";
};
int compare_command(const CompareArguments& arguments, std::ostream& out);

struct AnalyseArguments {
  std::vector<std::string> runs;
  std::string text;                         // file, "-": standard input
  std::string html = "analysis.html";       // file for the page
  std::vector<std::int64_t> layers, heads;  // to show, from 0; empty: as many as fit
  std::optional<std::int64_t> tokens;       // from the start of the text; not set: at most 256
};
int analyse_command(const AnalyseArguments& arguments, std::ostream& out, std::ostream& err);

struct TransportArguments {
  // The problem, exactly one of these; empty: not given.
  std::string cost, from, to, sort, example;  // files, except `example`, a name
  std::string source, target;                 // files of masses; empty: equal ones
  bool squared = false;                       // distances between points
  double regularization = 0.01, tolerance = 1e-6;
  std::int64_t max_iterations = 100'000;
  bool scales = false;    // --eps-scaling
  std::string plan, svg;  // files to write; empty: none
};
int transport_command(const TransportArguments& arguments, std::ostream& out);

// The arguments of a submission to Slurm (docs/slurm.md).
struct SubmitArguments {
  std::string config, run;
  std::string site;          // file of a site profile
  std::string exclude_file;  // doctor's, with hosts to avoid; empty: none
  std::vector<std::string> settings;
  int nodes = 1;
  std::string time;                   // limit per job, as sbatch accepts it; empty: the profile's
  int restarts = 3, spare_nodes = 0;  // as in TrainArguments
  std::optional<int> min_ranks;
  bool fresh = false;
  int chain = 1;      // length of the chain of jobs that continue the run
  std::string sweep;  // "path=value,value,...": a run RUN/value for each; empty: one run
  std::string name;   // of the job; empty: the run folder's
  bool dry_run = false;
};
int submit_command(const SubmitArguments& arguments, std::ostream& out, std::ostream& err);

struct StatusArguments {
  std::string run;
  bool json = false;
};
int status_command(const StatusArguments& arguments, std::ostream& out, std::ostream& err);

struct TailArguments {
  std::string run;
  int lines = 10;  // of each file, from its end
  bool follow = true;
};
int tail_command(const TailArguments& arguments, std::ostream& out, std::ostream& err);

int cancel_command(const std::string& run, std::ostream& out, std::ostream& err);

int verify_command(const std::string& path, std::ostream& out, std::ostream& err);

// Subcommands of `bench`. Each first checks the results of what it measures (Error(kInternal) if
// one is wrong), then reports a Markdown table. `line`: the whole command line as it was given, for
// the report's title.
struct BenchLoaderArguments {
  std::vector<std::string> line;
  std::string corpus;  // empty: makes one of random bytes in a temporary folder
  std::string record;  // its rows; empty: windows of tokens, or the record with the largest rows
  std::optional<std::int64_t> length;  // of windows; not set: 1024
  bool cold = false;                   // drop the shards from the page cache first
  int rounds = 20;
};
int bench_loader_command(const BenchLoaderArguments& arguments, std::ostream& out);

struct BenchCorpusArguments {
  std::string name, out;  // of generated_names() (data/generate/generate.h); the folder to make
  double scale = 1;
  std::uint64_t seed = 1;
};
int bench_corpus_command(const BenchCorpusArguments& arguments, std::ostream& out,
                         std::ostream& err);

struct BenchCommArguments {
  std::vector<std::string> line;
  std::optional<int> ranks;           // as TrainArguments::ranks
  std::optional<int> ranks_per_node;  // not set: one level
  std::string device = "cpu";
  std::string bytes = "4K-64M";  // smallest and largest size
  int rounds = 11;
  // A step of this configuration instead of single operations; empty: none.
  std::string config;
  std::vector<std::string> settings;
  std::optional<std::int64_t> vocabulary;  // not set: 256, if the model reads tokens
  LinkArguments links;
  bool json = false;
};
int bench_comm_command(const BenchCommArguments& arguments, std::ostream& out, std::ostream& err);

struct BenchStepArguments {
  std::vector<std::string> line;
  std::string config;
  std::vector<std::string> settings;
  std::optional<std::int64_t> vocabulary;  // not set: 256, if the model reads tokens
  int steps = 20;
  bool profile = false;  // also report the time of each operation
};
int bench_step_command(const BenchStepArguments& arguments, std::ostream& out);

struct BenchAttentionArguments {
  std::vector<std::string> line;
  // Mechanisms of configs/schema/attention.proto: a name, or text with its fields.
  std::vector<std::string> mechanisms = {"block_local { block: 64 }", "sinkhorn { block: 64 }"};
  std::vector<std::int64_t> lengths = {1024};
  std::int64_t batch = 4, heads = 4, head_dim = 64;
  std::string dtype = "fp32", device = "cpu";
  bool encoder = false;           // not causal
  bool library_defaults = false;  // do not call compute_on_cpu()
  bool recorded = false;          // launch CUDA graphs
  int rounds = 11;
  std::string svg, table;  // files to write; empty: none
};
int bench_attention_command(const BenchAttentionArguments& arguments, std::ostream& out);

int config_print_command(const std::string& file, const std::vector<std::string>& settings,
                         std::ostream& out, std::ostream& err);
int config_diff_command(const std::string& before, const std::string& after, std::ostream& out);
int config_reference_command(std::ostream& out);

}  // namespace birkhoff
