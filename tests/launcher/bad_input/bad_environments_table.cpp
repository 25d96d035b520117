// The program's environment: system calls that fail, standard input and output, variables, limits.
#include <cerrno>
#include <limits>

#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

// Fails the first call of that name on a path that contains `part`.
FileFaultHook fails(const std::string& call, const std::string& part, int error) {
  return [=](const char* name, const std::string& path, std::int64_t) {
    return name == call && path.find(part) != std::string::npos ? error : 0;
  };
}

BadInput fault(std::string name, std::string line, ExitCode code, const std::string& call,
               const std::string& part, int error, std::vector<std::string> words) {
  words.push_back(call + " of '");
  return {.name = "fault: " + name,
          .line = std::move(line),
          .code = code,
          .words = std::move(words),
          .fault = fails(call, part, error)};
}

std::vector<BadInput> faults() {
  using enum ExitCode;
  const std::string chars = "prepare --out new --tokenizer chars text/one.txt";
  const std::string step = "run/checkpoints/step-00000004";
  return {
      fault("no space for a tokenizer", chars, kStorage, "write", "tokenizer.chars", ENOSPC,
            {"No space left", "free space"}),
      fault("no space for the manifest", chars, kStorage, "write", "manifest.json", ENOSPC,
            {"No space left", "new/manifest.json"}),
      fault("manifest cannot be synced", chars, kStorage, "fsync", "manifest.json", EIO,
            {"Input/output error", "may be lost"}),
      fault("manifest cannot be renamed", chars, kStorage, "rename", "manifest.json", EDQUOT,
            {"quota"}),
      fault("manifest cannot be closed", chars, kStorage, "close", "manifest.json", ENOSPC,
            {"No space left"}),
      fault("folder cannot be made", chars, kStorage, "mkdir", "new", EROFS,
            {"Read-only file system", "new"}),
      fault("folder cannot be locked", chars, kStorage, "flock", "new", EIO, {"new/.unfinished"}),
      fault("folder cannot be synced", chars, kStorage, "fsync", "new", EIO,
            {"Input/output error"}),
      fault("text not permitted", chars, kStorage, "open", "text/one.txt", EACCES,
            {"Permission denied", "text/one.txt"}),
      fault("text on a bad disk", chars, kStorage, "pread", "text/one.txt", EIO,
            {"Input/output error", "at offset"}),
      fault("folder of text not permitted", "prepare --out new text", kStorage, "opendir", "text",
            EACCES, {"Permission denied", "text"}),
      fault("folder of text on a bad disk", "prepare --out new text", kStorage, "readdir", "text",
            EIO, {"Input/output error"}),
      fault("too many open files", "config print good.txtpb", kStorage, "open", "good.txtpb",
            EMFILE, {"Too many open files", "ulimit -n"}),
      fault("configuration not permitted", "config print good.txtpb", kStorage, "open",
            "good.txtpb", EACCES, {"Permission denied", "permissions"}),
      fault("configuration on a bad disk", "config print good.txtpb", kStorage, "read",
            "good.txtpb", EIO, {"Input/output error"}),
      fault("corpus not permitted", "train good.txtpb --run new", kStorage, "open",
            "corpus/manifest.json", EACCES, {"Permission denied"}),
      fault("manifest on a bad disk", "train good.txtpb --run new", kStorage, "read",
            "corpus/manifest.json", EIO, {"Input/output error"}),
      fault("shard not permitted", "inspect corpus", kStorage, "open", "valid-tokens", EACCES,
            {"Permission denied", "valid-tokens-00000.h5"}),
      fault("shard without a size", "inspect corpus", kStorage, "fstat", "valid-tokens", EIO,
            {"valid-tokens-00000.h5"}),
      fault("shard on a bad disk", "eval run", kStorage, "pread", "valid-tokens", EIO,
            {"Input/output error", "valid-tokens-00000.h5"}),
      fault("shard on a bad disk, seen by verify", "verify corpus", kStorage, "pread",
            "train-tokens", EIO, {"train-tokens-00000.h5"}),
      fault("tokenizer on a bad disk", "verify corpus", kStorage, "read", "tokenizer.chars", EIO,
            {"Input/output error"}),
      fault("model not permitted", "verify " + step, kStorage, "open", "model-", EACCES,
            {"Permission denied", "model-"}),
      fault("model on a bad disk", "verify " + step, kStorage, "pread", "model-", EIO,
            {"Input/output error", "model-"}),
      fault("optimizer on a bad disk", "eval " + step, kStorage, "pread", "optimizer-", EIO,
            {"optimizer-"}),
      fault("checkpoint's manifest on a bad disk", "inspect " + step, kStorage, "read", step, EIO,
            {"manifest.json"}),
      fault("checkpoints' folder not permitted", "eval run", kStorage, "opendir", "run/checkpoints",
            EACCES, {"Permission denied"}),
  };
}

std::vector<BadInput> standard_streams() {
  using enum ExitCode;
  const auto full = [](const std::string& line) {
    return BadInput{.name = "standard output full: " + line,
                    .line = line,
                    .code = kStorage,
                    .words = {"standard output", "No space left"},
                    .output = "/dev/full"};
  };
  return {
      as_process_too(full("config print good.txtpb")),
      full("config reference"),
      full("inspect corpus"),
      full("inspect run"),
      full("verify corpus"),
      full("eval run --json"),
      full("sample run --prompt a --tokens 5"),
      full("--version"),
      full("train --help"),
      {.name = "standard input empty",
       .line = "prepare --out new -",
       .words = {"no text in the input", "1 empty"}},
      {.name = "standard input a folder",
       .line = "prepare --out new -",
       .code = kData,
       .words = {"/dev/stdin", "folder"},
       .input = "text"},
      {.name = "standard input no UTF-8",
       .line = "prepare --out new --tokenizer chars -",
       .code = kData,
       .words = {"byte 400", "UTF-8"},
       .spoil =
           [] { write_bytes("latin.txt", std::string(400, 'a') + "\xe9" + std::string(400, 'a')); },
       .input = "latin.txt"},
      {.name = "standard input closed",
       .line = "prepare --out new -",
       .words = {"standard input is closed"},
       .where = Where::kProcess,
       .shell = "exec <&-"},
      {.name = "standard input closed, a prompt",
       .line = "sample run --prompt-file -",
       .words = {"standard input is closed"},
       .where = Where::kProcess,
       .shell = "exec <&-"},
      {.name = "standard input open for writing",
       .line = "prepare --out new -",
       .words = {"standard input is closed"},
       .where = Where::kProcess,
       .shell = "exec 0>written.txt"},
      {.name = "standard output closed",
       .line = "config print good.txtpb",
       .code = kStorage,
       .words = {"standard output"},
       .where = Where::kProcess,
       .shell = "exec >&-"},
  };
}

std::vector<BadInput> variables() {
  using enum ExitCode;
  const auto variable = [](std::string name, std::string line, Environment environment,
                           std::vector<std::string> words) {
    return BadInput{.name = "environment: " + name,
                    .line = std::move(line),
                    .code = kUsage,
                    .words = std::move(words),
                    .environment = std::move(environment)};
  };
  const std::string train = "train good.txtpb --run new", ranks = train + " --ranks 2";
  return {
      variable("OMP_NUM_THREADS a word", train, {{"OMP_NUM_THREADS", "two"}},
               {"OMP_NUM_THREADS", "'two'"}),
      variable("OMP_NUM_THREADS 0", train, {{"OMP_NUM_THREADS", "0"}}, {"OMP_NUM_THREADS", "'0'"}),
      variable("OMP_NUM_THREADS negative", train, {{"OMP_NUM_THREADS", "-4"}},
               {"OMP_NUM_THREADS", "'-4'"}),
      variable("OMP_NUM_THREADS a fraction", train, {{"OMP_NUM_THREADS", "1.5"}},
               {"OMP_NUM_THREADS", "'1.5'"}),
      variable("OMP_NUM_THREADS overflows", train, {{"OMP_NUM_THREADS", "99999999999"}},
               {"OMP_NUM_THREADS", "99999999999"}),
      variable("OMP_NUM_THREADS too many", train, {{"OMP_NUM_THREADS", "50000"}},
               {"OMP_NUM_THREADS is 50000", "64 for each", "at most"}),
      variable("OMP_NUM_THREADS too many, supervised", ranks, {{"OMP_NUM_THREADS", "50000"}},
               {"OMP_NUM_THREADS is 50000"}),
      variable("OMP_NUM_THREADS too many, eval", "eval run", {{"OMP_NUM_THREADS", "50000"}},
               {"OMP_NUM_THREADS is 50000"}),
      variable("OMP_NUM_THREADS too many, sample", "sample run --prompt a",
               {{"OMP_NUM_THREADS", "50000"}}, {"OMP_NUM_THREADS is 50000"}),
      variable("OMP_NUM_THREADS too many, bench step", "bench step good.txtpb",
               {{"OMP_NUM_THREADS", "50000,2"}}, {"OMP_NUM_THREADS is 50000"}),
      variable("OMP_NUM_THREADS too many, bench attention", "bench attention",
               {{"OMP_NUM_THREADS", "50000"}}, {"OMP_NUM_THREADS is 50000"}),
      {.name = "environment: too few open files for mpirun",
       .line = ranks,
       .words = {"--ranks 2", "48 open files", "the limit is 32", "ulimit -n 48"},
       .where = Where::kProcess,
       .shell = "ulimit -n 32"},
      {.name = "environment: too few open files for many ranks",
       .line = train + " --ranks 64",
       .words = {"--ranks 64", "544 open files", "the limit is 256"},
       .where = Where::kProcess,
       .shell = "ulimit -n 256"},
      variable("OMP_NUM_THREADS a word, supervised", ranks, {{"OMP_NUM_THREADS", "all"}},
               {"OMP_NUM_THREADS", "'all'"}),
      as_process(variable("BIRKHOFF_CPU a word", train, {{"BIRKHOFF_CPU", "sse9"}},
                          {"BIRKHOFF_CPU=sse9", "avx2"})),
      as_process(variable("BIRKHOFF_CPU in capitals", "eval run", {{"BIRKHOFF_CPU", "AVX2"}},
                          {"BIRKHOFF_CPU=AVX2", "portable, avx2"})),
      as_process(variable("BIRKHOFF_CPU two sets", "eval run", {{"BIRKHOFF_CPU", "avx2,avx512"}},
                          {"BIRKHOFF_CPU=avx2,avx512", "unset"})),
      variable("no GPU", train + " --set device=cuda", {{"CUDA_VISIBLE_DEVICES", ""}},
               {"device: cuda", "device=cpu"}),
      variable("--ranks under mpirun", ranks, {{"OMPI_COMM_WORLD_SIZE", "4"}},
               {"--ranks 2", "4 ranks", "leave --ranks out"}),
      variable("--ranks under mpirun of one rank", ranks, {{"OMPI_COMM_WORLD_SIZE", "1"}},
               {"--ranks 2", "leave --ranks or mpirun out"}),
      as_process(variable("a step that has ended", train,
                          {{"PMIX_NAMESPACE", "slurm.pmix.1.0"},
                           {"PMIX_RANK", "0"},
                           {"PMIX_DSTORE_ESH_BASE_PATH", "/nowhere"}},
                          {"/nowhere", "unset ${!PMIX_@} ${!SLURM_@}"})),
      variable("--ranks under PMI", ranks, {{"PMI_SIZE", "3"}}, {"--ranks 2", "3 ranks"}),
      as_process_too(variable("--ranks under srun", ranks, {{"SLURM_STEP_NUM_TASKS", "8"}},
                              {"--ranks 2", "8 ranks"})),
      as_process_too(variable("no mpirun in PATH", ranks, {{"PATH", "/nowhere:/proc"}},
                              {"--ranks 2", "mpirun", "PATH"})),
      variable("PATH empty", ranks, {{"PATH", ""}}, {"mpirun", "PATH"}),
      variable("PATH unset", ranks, {{"PATH", std::nullopt}}, {"mpirun", "PATH"}),
      as_process(variable("srun without PMIx", train, {{"SLURM_STEP_NUM_TASKS", "4"}},
                          {"4 ranks", "MPI sees 1", "srun --mpi=pmix"})),
      {.name = "environment: mpirun that cannot be executed",
       .line = ranks,
       .words = {"mpirun", "PATH"},
       .spoil = [] { write_bytes("bin/mpirun", "#!/bin/sh\n"); },
       .environment = {{"PATH", "bin"}}},
      {.name = "environment: mpirun of nothing",
       .line = ranks,
       .code = kPeer,
       .words = {"mpirun"},
       .spoil =
           [] {
             write_bytes("bin/mpirun", "#!/nowhere/sh\n");
             std::filesystem::permissions("bin/mpirun", std::filesystem::perms::owner_all);
           },
       .where = Where::kProcess,
       .environment = {{"PATH", "bin"}}},
      {.name = "environment: files limited to a kilobyte",
       .line = "prepare --out new text",
       .code = kStorage,
       .words = {"new/", "File too large"},
       .where = Where::kProcess,
       .shell = "ulimit -f 1"},
      {.name = "environment: another working directory",
       .line = "config print good.txtpb",
       .code = kConfig,
       .words = {"good.txtpb", "No such file"},
       .where = Where::kProcess,
       .shell = "mkdir elsewhere; cd elsewhere"},
  };
}

}  // namespace

std::vector<BadInput> bad_environments() {
  std::vector<BadInput> rows;
  for (auto table : {faults, standard_streams, variables}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
