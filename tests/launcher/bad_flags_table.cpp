// Command lines that do not parse, or name what is not there.
#include "bad_input.h"
#include "damage.h"
#include "data/prepare.h"

namespace birkhoff {
namespace {

BadInput usage(std::string name, std::string line, std::vector<std::string> words) {
  return {.name = std::move(name),
          .line = std::move(line),
          .code = ExitCode::kUsage,
          .words = std::move(words)};
}

std::vector<BadInput> verbs() {
  return {
      as_process_too(usage("verb misspelt", "trian good.txtpb --run new",
                           {"unknown command 'trian'", "did you mean 'train'"})),
      usage("verb of another program", "compile good.txtpb",
            {"unknown command 'compile'", "commands:", "prepare", "verify"}),
      usage("verb one letter short", "verfy run", {"'verfy'", "'verify'"}),
      usage("verb in capitals", "TRAIN good.txtpb --run new", {"unknown command 'TRAIN'"}),
      usage("verb empty", "'' good.txtpb", {"unknown command ''"}),
      {.name = "verb with a line end",
       .words = {"unknown command"},
       .arguments = {"tr\nain", "good.txtpb"}},
      {.name = "verb with an escape sequence",
       .words = {"unknown command"},
       .arguments = {"\x1b[31mtrain"}},
      usage("option without a verb", "--run new", {"--run"}),
      usage("option of the program misspelt", "--verson", {"--verson", "did you mean '--version'"}),
      usage("two verbs", "inspect run verify run", {"verify"}),
      usage("config without its verb", "config", {"subcommand", "birkhoff config"}),
      usage("config's verb misspelt", "config prnt good.txtpb", {"prnt", "birkhoff config"}),
      usage("config print without a file", "config print", {"CONFIG", "required"}),
      usage("config diff of one file", "config diff good.txtpb", {"AFTER", "required"}),
      usage("config diff of three files", "config diff good.txtpb good.txtpb good.txtpb",
            {"good.txtpb"}),
      usage("config reference with an argument", "config reference train", {"train"}),
  };
}

std::vector<BadInput> train() {
  return {
      as_process_too(
          usage("train without anything", "train", {"required", "birkhoff train --help"})),
      usage("train without --run", "train good.txtpb", {"--run", "required"}),
      usage("train without a configuration", "train --run new", {"CONFIG", "required"}),
      usage("train with two configurations", "train good.txtpb other.txtpb --run new",
            {"other.txtpb"}),
      usage("train --run without a folder", "train good.txtpb --run", {"--run"}),
      usage("train --run twice", "train good.txtpb --run new --run newer", {"--run"}),
      usage("train --ranks 0", "train good.txtpb --run new --ranks 0",
            {"--ranks", "0", "1 to 4096"}),
      usage("train --ranks negative", "train good.txtpb --run new --ranks -2", {"--ranks"}),
      usage("train --ranks too many", "train good.txtpb --run new --ranks 4097",
            {"--ranks", "4097"}),
      as_process_too(usage("train --ranks a word", "train good.txtpb --run new --ranks two",
                           {"--ranks", "two"})),
      usage("train --ranks a fraction", "train good.txtpb --run new --ranks 1.5",
            {"--ranks", "1.5"}),
      usage("train --ranks without a number", "train good.txtpb --run new --ranks", {"--ranks"}),
      usage("train --ranks twice", "train good.txtpb --run new --ranks 2 --ranks 3", {"--ranks"}),
      usage("train --ranks overflows", "train good.txtpb --run new --ranks 99999999999999999999",
            {"--ranks"}),
      usage("train --rank", "train good.txtpb --run new --rank 2",
            {"--rank", "did you mean '--ranks'"}),
      usage("train -n", "train good.txtpb --run new -n 2", {"-n"}),
      usage("train --steps", "train good.txtpb --run new --steps 5", {"--steps"}),
      usage("train --set without a value", "train good.txtpb --run new --set", {"--set"}),
      usage("train --fresh with a value", "train good.txtpb --run new --fresh=perhaps",
            {"--fresh"}),
      usage("train of other's flag", "train good.txtpb --run new --json", {"--json"}),
  };
}

std::vector<BadInput> eval_and_sample() {
  return {
      usage("eval without a path", "eval", {"PATH", "required"}),
      usage("eval of two paths", "eval run run", {"run"}),
      usage("eval --split train", "eval run --split train", {"--split", "train", "valid"}),
      usage("eval --split empty", "eval run --split ''", {"--split"}),
      usage("eval --split twice", "eval run --split valid --split test", {"--split"}),
      usage("eval --json with a value", "eval run --json=perhaps", {"--json"}),
      usage("eval --splits", "eval run --splits test", {"--splits", "did you mean '--split'"}),
      as_process_too(usage("eval of nothing", "eval nowhere", {"nowhere", "no such"})),
      usage("eval of a file", "eval good.txtpb", {"good.txtpb", "neither"}),
      usage("eval of a folder of text", "eval text", {"text", "neither a corpus", "nor a run"}),
      usage("eval of a corpus", "eval corpus", {"corpus", "name a run folder or a checkpoint"}),
      usage("eval of an empty path", "eval ''", {"no such"}),
      usage("sample without a prompt", "sample run", {"--prompt", "required"}),
      usage("sample without a path", "sample --prompt a", {"PATH", "required"}),
      usage("sample --prompt twice", "sample run --prompt a --prompt b", {"--prompt"}),
      usage("sample --tokens 0", "sample run --prompt a --tokens 0", {"--tokens", "0"}),
      usage("sample --tokens negative", "sample run --prompt a --tokens -1", {"--tokens", "-1"}),
      usage("sample --tokens a word", "sample run --prompt a --tokens many", {"--tokens", "many"}),
      usage("sample --tokens with an exponent", "sample run --prompt a --tokens 1e3",
            {"--tokens", "1e3"}),
      usage("sample --tokens too many", "sample run --prompt a --tokens 10000001",
            {"--tokens", "10000001"}),
      usage("sample --temperature negative", "sample run --prompt a --temperature -0.1",
            {"--temperature", "-0.1"}),
      usage("sample --temperature too high", "sample run --prompt a --temperature 101",
            {"--temperature", "101"}),
      usage("sample --temperature nan", "sample run --prompt a --temperature nan",
            {"temperature", "nan"}),
      usage("sample --temperature inf", "sample run --prompt a --temperature inf",
            {"--temperature", "inf"}),
      usage("sample --temperature a word", "sample run --prompt a --temperature hot",
            {"--temperature", "hot"}),
      usage("sample --top-k negative", "sample run --prompt a --top-k -1", {"--top-k", "-1"}),
      usage("sample --top-k a fraction", "sample run --prompt a --top-k 2.5", {"--top-k", "2.5"}),
      usage("sample --seed negative", "sample run --prompt a --seed -1", {"--seed", "-1"}),
      usage("sample --seed overflows", "sample run --prompt a --seed 18446744073709551616",
            {"--seed"}),
      usage("sample --seed empty", "sample run --prompt a --seed ''", {"--seed"}),
      usage("sample of a corpus", "sample corpus --prompt a", {"corpus", "is a corpus"}),
      {.name = "sample of characters the model has not",
       .line = "sample run --prompt 'ROMEO:'",
       .code = ExitCode::kData,
       .words = {"character 'R'", "U+0052", "byte 0"},
       .where = Where::kHereAndProcess},
      {.name = "sample of no UTF-8",
       .code = ExitCode::kData,
       .words = {"byte 2", "UTF-8"},
       .arguments = {"sample", "run", "--prompt", "ab\xff"}},
  };
}

std::vector<BadInput> inspect_and_verify() {
  return {
      usage("inspect without a path", "inspect", {"PATH", "required"}),
      usage("inspect of nothing", "inspect nowhere", {"nowhere", "no such"}),
      usage("inspect of an unrelated folder", "inspect text", {"text", "neither"}),
      usage("inspect --bigram of a run", "inspect run --bigram", {"--bigram", "run", "corpus"}),
      usage("inspect --bigrams", "inspect corpus --bigrams", {"did you mean '--bigram'"}),
      usage("inspect of two", "inspect corpus run", {"run"}),
      usage("verify without a path", "verify", {"PATH", "required"}),
      usage("verify of two", "verify corpus run", {"run"}),
      usage("verify of nothing", "verify run/checkpoints/step-00000009",
            {"step-00000009", "no such"}),
      usage("verify with a flag", "verify run --quick", {"--quick"}),
      {.name = "verify of a dangling link",
       .line = "verify link",
       .words = {"link"},
       .spoil = [] { std::filesystem::create_symlink("nowhere", "link"); }},
      {.name = "verify of an empty folder",
       .line = "verify empty",
       .words = {"empty", "neither"},
       .spoil = [] { std::filesystem::create_directory("empty"); }},
  };
}

std::vector<BadInput> bench() {
  const auto bytes = [](const std::string& range) {
    return usage("bench comm --bytes " + range, "bench comm --ranks 2 --bytes " + range,
                 {"--bytes '" + range + "'", "4K-64M"});
  };
  return {
      usage("bench without its verb", "bench", {"subcommand", "birkhoff bench"}),
      usage("bench's verb misspelt", "bench stp good.txtpb", {"'stp'", "did you mean 'step'"}),
      usage("bench step without a configuration", "bench step", {"CONFIG", "required"}),
      usage("bench attention --recorded on a CPU", "bench attention --recorded",
            {"--recorded", "--device cuda"}),
      usage("bench step --steps 0", "bench step good.txtpb --steps 0", {"--steps", "0"}),
      usage("bench step --vocabulary 1", "bench step good.txtpb --vocabulary 1",
            {"--vocabulary", "1"}),
      {.name = "bench step of a configuration that is not there",
       .line = "bench step nowhere.txtpb",
       .code = ExitCode::kConfig,
       .words = {"nowhere.txtpb", "No such file"}},
      {.name = "bench step of a task that is not trained",
       .line = "bench step good.txtpb --set 'task={ translation {} }'",
       .code = ExitCode::kConfig,
       .words = {"translation"}},
      {.name = "bench step with virtual shards",
       .line = "bench step good.txtpb --set train.invariant.shards=2",
       .code = ExitCode::kConfig,
       .words = {"train.invariant.shards is 2", "train.invariant.shards=0"}},
      usage("bench step on a GPU", "bench step good.txtpb --set device=cuda",
            {"device: cuda", "device=cpu"}),
      usage("bench attention --lengths 0", "bench attention --lengths 1024,0", {"--lengths", "0"}),
      usage("bench attention --lengths of words", "bench attention --lengths long",
            {"--lengths", "long"}),
      usage("bench attention --dtype int8", "bench attention --dtype int8", {"--dtype", "int8"}),
      usage("bench attention --rounds 0", "bench attention --rounds 0", {"--rounds", "0"}),
      usage("bench attention --heads 0", "bench attention --heads 0", {"--heads", "0"}),
      {.name = "bench attention of a mechanism that does not exist",
       .line = "bench attention sinkhron",
       .code = ExitCode::kConfig,
       .words = {"MECHANISM 'sinkhron'", "did you mean 'sinkhorn'"}},
      {.name = "bench attention of a field that does not exist",
       .line = "bench attention 'block_local { blok: 64 }'",
       .code = ExitCode::kConfig,
       .words = {"blok", "did you mean 'block'"}},
      {.name = "bench attention of blocks without tokens",
       .line = "bench attention 'block_local { block: 0 }'",
       .code = ExitCode::kConfig,
       .words = {"block_local.block", "[1, 1048576], is 0"}},
      {.name = "bench attention of blocks longer than any sequence",
       .line = "bench attention 'block_local { block: 1048577 }'",
       .code = ExitCode::kConfig,
       .words = {"block_local.block", "[1, 1048576], is 1048577"}},
      {.name = "bench attention with more iterations than there may be",
       .line = "bench attention 'sinkhorn { block: 16 iterations: 10000000 }'",
       .code = ExitCode::kConfig,
       .words = {"sinkhorn.iterations", "[0, 1000], is 10000000"}},
      {.name = "bench attention with more blocks than there may be",
       .line = "bench attention 'sinkhorn { block: 16 max_blocks: 2000000000 }'",
       .code = ExitCode::kConfig,
       .words = {"sinkhorn.max_blocks", "[0, 1048576], is 2000000000"}},
      {.name = "bench attention of a mixture that drops all",
       .line = "bench attention 'sinkhorn_mixture { sinkhorn { block: 16 } dense { dropout: 1 } }'",
       .code = ExitCode::kConfig,
       .words = {"sinkhorn_mixture.dense.dropout", "[0, 1), is 1"}},
      {.name = "bench attention without a GPU",
       .line = "bench attention --device cuda",
       .words = {"device: cuda"},
       .environment = {{"CUDA_VISIBLE_DEVICES", ""}}},
      {.name = "bench attention --svg into a folder that is not there",
       .line = "bench attention --svg nowhere/time.svg",
       .code = ExitCode::kStorage,
       .words = {"nowhere"}},
      as_process_too(usage("bench comm on one rank", "bench comm", {"1 rank", "--ranks 2"})),
      usage("bench comm --ranks 1", "bench comm --ranks 1", {"--ranks", "2 to 4096"}),
      usage("bench comm --device tpu", "bench comm --ranks 2 --device tpu", {"--device", "tpu"}),
      {.name = "bench comm without a GPU",
       .line = "bench comm --ranks 2 --device cuda",
       .words = {"device: cuda"},
       .where = Where::kHereAndProcess,
       .environment = {{"CUDA_VISIBLE_DEVICES", ""}}},
      {.name = "bench comm --ranks under mpirun",
       .line = "bench comm --ranks 2",
       .words = {"--ranks 2", "4 ranks", "leave --ranks out"},
       .environment = {{"OMPI_COMM_WORLD_SIZE", "4"}}},
      bytes("4K"),
      bytes("64M-4K"),
      bytes("0-4K"),
      bytes("4K-8G"),
      bytes("4k-8k"),
      bytes("4K-8K-16K"),
      bytes("4KB-8KB"),
      bytes("99999999999999999999-4K"),
      usage("bench loader --rounds 0", "bench loader --rounds 0", {"--rounds", "0"}),
      {.name = "bench loader of nothing",
       .line = "bench loader nowhere",
       .code = ExitCode::kData,
       .words = {"nowhere"},
       .where = Where::kHereAndProcess},
      {.name = "bench loader of too short a corpus",
       .line = "bench loader corpus",
       .code = ExitCode::kData,
       .words = {"1024"},
       .spoil =
           [] {
             write_bytes("short.txt", std::string(500, 'a'));
             std::filesystem::remove_all("corpus");
             PrepareOptions options;
             options.out = "corpus";
             options.paths = {"short.txt"};
             options.valid_fraction = 0;
             prepare_corpus(options);
           }},
      {.name = "bench loader of a forged corpus",
       .line = "bench loader bytes",
       .code = ExitCode::kData,
       .words = {"train-tokens-00000.h5"},
       .spoil = [] { forge_ids("bytes", "train", 0, 60000, 1000); }},
  };
}

}  // namespace

std::vector<BadInput> bad_flags() {
  std::vector<BadInput> rows;
  for (auto table : {verbs, train, eval_and_sample, inspect_and_verify, bench}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
