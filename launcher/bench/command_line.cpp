// The subcommands of `birkhoff bench`.
#include <limits>

#include "data/generate/generate.h"
#include "launcher/command_line.h"

namespace birkhoff {

void CommandLine::add_bench() {
  CLI::App* c = subcommand(
      app_, "bench", "Benchmark a component against its lower bound and a reference implementation",
      "  birkhoff bench step configs/baby_gpt_dense.txtpb\n"
      "  birkhoff bench attention sinkhorn --lengths 1024,4096\n"
      "  birkhoff bench comm --ranks 2");
  c->require_subcommand(1);
  CLI::App* step = subcommand(
      *c, "step",
      "A training step on synthetic tokens, in one process. Checks its loss and gradients "
      "against fp64, then\ncompares its time with the time of the model's FLOPs at the speed of "
      "at::mm. tests/bench/step_speed.py\ncompares the step with PyTorch's eager GPT, in "
      "alternating rounds.",
      "  birkhoff bench step configs/baby_gpt_dense.txtpb\n"
      "  birkhoff bench step my.txtpb --set train.precision=bf16 --vocabulary 32000");
  step->add_option("CONFIG", bench_step_.config, "configuration (.txtpb)")->required();
  add_settings(step, bench_step_.settings);
  add_number(step, "--steps", bench_step_.steps, 1, 1'000'000, "number of steps to measure");
  add_number(step, "--vocabulary", bench_step_.vocabulary, 2, 10'000'000,
             "number of token ids to draw from; default: 256");
  step->add_flag("--profile", bench_step_.profile, "also report the time of each operation");

  add_bench_attention(*c);

  CLI::App* comm = subcommand(
      *c, "comm",
      "Collective operations between ranks. Checks their results, then measures their time and "
      "nccl-tests'\nalgbw and busbw, and compares them with a memcpy of the same bytes (CPU) "
      "and the same operations\nby MPI (CPU) or NCCL (GPU).\nWith CONFIG: the communication of a "
      "training step on the configuration's mesh. One rank measures its\ncomputation, then all "
      "replay the step with timed waits in its place, so ranks may outnumber cores.",
      "  birkhoff bench comm --ranks 2\n"
      "  birkhoff bench comm my.txtpb --ranks 4 --set mesh.tensor=2 --network-gbs 0.1\n"
      "  srun --mpi=pmix -n 8 birkhoff bench comm --device cuda --bytes 1M-1G");
  CLI::Option* config =
      comm->add_option("CONFIG", bench_comm_.config, "configuration (.txtpb) of a step");
  add_settings(comm, bench_comm_.settings)->needs(config);
  add_number(comm, "--vocabulary", bench_comm_.vocabulary, 2, 10'000'000,
             "number of token ids to draw from; default: 256")
      ->needs(config);
  add_links(comm, bench_comm_.links, config);
  comm->add_flag("--json", bench_comm_.json, "print one JSON object")->needs(config);
  add_number(comm, "--ranks", bench_comm_.ranks, 2, 4096, "start this many MPI ranks here");
  add_number(comm, "--ranks-per-node", bench_comm_.ranks_per_node, 1, 4096,
             "sum inside nodes of this many ranks first, as mesh.ranks_per_node")
      ->excludes(config);
  add_device(comm, bench_comm_.device, "cpu, or cuda: one GPU per rank")->excludes(config);
  comm->add_option("--bytes", bench_comm_.bytes, "sizes, each four times the previous one")
      ->type_name("MIN-MAX")
      ->excludes(config)
      ->capture_default_str();
  add_rounds(comm, bench_comm_.rounds);

  CLI::App* made = subcommand(
      *c, "corpus",
      "Makes a corpus of generated rows, as large as a published data set and with its statistics, "
      "for `bench loader`.\nimagenet64: 1,281,167 images of 64 x 64 with labels, and 50,000 in the "
      "split valid (16.4 GB). lm1b: 30 million\nsentences, 0.8 G words by Zipf's law, a vocabulary "
      "of 793,471 ids (3.2 GB). All cores make shards; their number\nchanges no byte.",
      "  birkhoff bench corpus imagenet64 --out corpus/imagenet64\n"
      "  birkhoff bench corpus lm1b --out corpus/small --scale 0.01 --seed 2");
  made->add_option("NAME", bench_corpus_.name, "imagenet64 or lm1b")
      ->required()
      ->check(CLI::IsMember(generated_names()));
  made->add_option("--out", bench_corpus_.out, "corpus folder to create")
      ->required()
      ->type_name("DIR");
  add_number(made, "--scale", bench_corpus_.scale, 1e-6, 100.0,
             "share of the published number of rows");
  add_number(made, "--seed", bench_corpus_.seed, 0, std::numeric_limits<std::uint64_t>::max(),
             "seed of the rows");

  CLI::App* loader = subcommand(
      *c, "loader",
      "The training loader on the split train. Checks its samples, compares its speed with a plain "
      "pread loop over\nthe same rows, and measures its first batch and its memory. Reads the whole "
      "split beforehand, except with\n--cold. Without CORPUS also measures the start-up on 10^12 "
      "tokens.",
      "  birkhoff bench loader\n"
      "  birkhoff bench loader corpus/mine --rounds 50\n"
      "  birkhoff bench loader corpus/images --cold --rounds 3");
  CLI::Option* corpus =
      loader->add_option("CORPUS", bench_loader_.corpus,
                         "corpus folder; default: 64 MB of random bytes in a temporary folder");
  CLI::Option* record =
      loader
          ->add_option("--record", bench_loader_.record,
                       "read rows of this record; default: windows of tokens, or without tokens "
                       "the record with the largest rows")
          ->type_name("NAME")
          ->needs(corpus);
  add_number(loader, "--length", bench_loader_.length, 1, 1 << 24,
             "tokens of a window; default: 1024")
      ->excludes(record);
  loader->add_flag("--cold", bench_loader_.cold,
                   "remove the shards from the page cache first, and read 20,000 samples");
  add_rounds(loader, bench_loader_.rounds);
}

void CommandLine::add_bench_attention(CLI::App& bench) {
  BenchAttentionArguments& a = bench_attention_;
  CLI::App* c = subcommand(
      bench, "attention",
      "Only attention, on synthetic inputs, in one process. Checks its output and gradients "
      "against fp64, then\ncompares time and memory with the machine's limits, with LibTorch's "
      "operations for the same mechanism\n(composed: its fused operations; eager: plain ones), and "
      "with LibTorch's dense attention.\nReferences in Python: tests/bench/attention_peers.py.",
      "  birkhoff bench attention\n"
      "  birkhoff bench attention dense 'sinkhorn { block: 128 iterations: 8 }' --lengths "
      "1024,4096\n"
      "  birkhoff bench attention sinkhorn --device cuda --dtype bf16 --heads 16 --svg time.svg");
  c->add_option("MECHANISM", a.mechanisms,
                "mechanisms of docs/configuration.md: names, or text with their fields")
      ->capture_default_str();
  c->add_option("--lengths", a.lengths, "tokens per sequence, one or several: 1024,4096")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
      ->capture_default_str();
  add_number(c, "--batch", a.batch, 1, 1 << 20, "number of sequences");
  add_number(c, "--heads", a.heads, 1, 65536, "number of heads");
  add_number(c, "--head-dim", a.head_dim, 1, 65536,
             "dimension of a head's queries, keys and values");
  c->add_option("--dtype", a.dtype, "type of queries, keys and values: fp32, fp64, bf16 or fp16")
      ->check(CLI::IsMember({"fp32", "fp64", "bf16", "fp16"}))
      ->capture_default_str();
  c->add_flag("--encoder", a.encoder, "queries also see later keys");
  c->add_flag("--library-defaults", a.library_defaults,
              "on a CPU: use the defaults of LibTorch and the allocator, not those of training");
  add_device(c, a.device, "cpu or cuda");
  c->add_flag("--recorded", a.recorded,
              "on a GPU: launch all candidates as CUDA graphs, like train.cuda_graph");
  add_rounds(c, a.rounds);
  c->add_option("--svg", a.svg, "file for a plot of time against length");
  c->add_option("--table", a.table, "file for the printed report");
}

void CommandLine::add_rounds(CLI::App* command, int& rounds) {
  add_number(command, "--rounds", rounds, 1, 100'000,
             "number of interleaved rounds; medians are reported");
}

int CommandLine::run_bench(const std::vector<std::string>& arguments, std::ostream& out,
                           std::ostream& err) {
  CLI::App* bench = app_.get_subcommand("bench");
  bench_loader_.line = bench_comm_.line = bench_step_.line = bench_attention_.line = arguments;
  if (bench->got_subcommand("corpus")) return bench_corpus_command(bench_corpus_, out, err);
  if (bench->got_subcommand("loader")) return bench_loader_command(bench_loader_, out);
  if (bench->got_subcommand("comm")) return bench_comm_command(bench_comm_, out, err);
  if (bench->got_subcommand("attention")) return bench_attention_command(bench_attention_, out);
  return bench_step_command(bench_step_, out);
}

}  // namespace birkhoff
