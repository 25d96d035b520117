// Checks of the job: the number of ranks, the program and its libraries, the configuration, the
// corpus and the GPUs.
#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <optional>

#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/text/plural.h"
#include "cluster/slurm_environment.h"
#include "configs/loader/config_io.h"
#include "data/corpus/corpus.h"
#include "launcher/app.h"
#include "launcher/doctor/probes.h"
#include "launcher/processes/ranks.h"

#ifdef BIRKHOFF_CUDA
#include "cluster/nccl_group.h"
#endif

namespace birkhoff {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// "train.steps: 8 instead of 4".
std::string differences_text(const configs::Config& usual, const configs::Config& mine) {
  std::string text;
  for (const ConfigDifference& difference : diff_configs(usual, mine)) {
    text += fmt::format("{}{}: {} instead of {}", text.empty() ? "" : ", ", difference.path,
                        difference.after, difference.before);
  }
  return text;
}

std::string read_one_byte(const std::string& path) {
  std::string byte(1, '\0');
  File::open_for_read(path, ExitCode::kData).pread_exact(byte.data(), 1, 0);
  return byte;
}

}  // namespace

// ---- World

Facts probe_world(const Subject& subject) {
  // mpirun's ranks also see the variables of the Slurm job or step in which it was started.
  const std::optional<int> of_step =
      variable("OMPI_COMM_WORLD_SIZE").empty() ? slurm_step_tasks() : std::nullopt;
  const bool by_srun = of_step.has_value();
  return {{"ranks", subject.world.size()},
          {"tasks", by_srun ? std::to_string(*of_step) : variable("SLURM_NTASKS")},
          {"by_srun", by_srun}};
}

Judgement judge_world(const Answers& answers) {
  Judgement judgement{counted(answers.front().facts.at("ranks").get<int>(), "rank")};
  for (const Answer& answer : answers) {
    const std::string ranks = fmt::to_string(answer.facts.at("ranks").get<int>());
    const std::string tasks = answer.facts.at("tasks").get<std::string>();
    if (tasks.empty() || tasks == ranks) continue;
    if (answer.facts.at("by_srun").get<bool>()) {
      judgement.add(Verdict::kFail, answer,
                    fmt::format("Slurm started {} tasks, but MPI sees {} ranks", tasks, ranks),
                    "start with srun --mpi=pmix, and with this program's MPI library");
    } else {
      judgement.add(
          Verdict::kWarn, answer,
          fmt::format("the Slurm job has {} tasks, but mpirun started {} ranks", tasks, ranks),
          "give --ranks or mpirun -n the number of tasks, unless tasks are left out on purpose");
    }
  }
  return judgement;
}

// ---- Program

Facts probe_program(const Subject&) {
  Facts facts = {{"file", program_hash()},
                 {"versions", version_text()},
                 {"MPI library", mpi_library()},
                 {"GPU driver", gpu_driver()}};
#ifdef BIRKHOFF_CUDA
  facts["NCCL"] = nccl_version();
#endif
  return facts;
}

Judgement judge_program(const Answers& answers) {
  Judgement judgement{fmt::format("the same build; {}", fact_of(answers.front(), "MPI library"))};
  Facts keys;  // another build may have other libraries: NCCL
  for (const Answer& answer : answers) keys.update(answer.facts);
  for (const auto& [key, value] : keys.items()) {
    add_minority(judgement, Verdict::kFail, answers, key, key + ": ",
                 "install the same build and the same libraries on all hosts");
  }
  return judgement;
}

// ---- Configuration

Facts probe_configuration(const Subject& subject) {
  const std::string text = subject.configuration ? config_text(*subject.configuration) : "";
  const std::string rank_0_text =
      subject.world.group().broadcast_bytes(text, 0, "doctor: configuration");
  const configs::Config& config = subject.config();
  std::string difference;
  if (!rank_0_text.empty() && text != rank_0_text) {
    difference = differences_text(parse_config(rank_0_text, "rank 0", {}), config);
  }
  return {{"hash", xxh3_hex(text.data(), text.size())}, {"from_rank_0", difference}};
}

Judgement judge_configuration(const Answers& answers) {
  Judgement judgement{"the same on all ranks"};
  const Majority majority = majority_of(answers, "hash");
  for (const Answer& other : majority.others) {
    std::string difference = other.facts.at("from_rank_0").get<std::string>();
    if (difference.empty()) {
      difference = fmt::format("hash {} instead of {}", fact_of(other, "hash"), majority.value);
    }
    judgement.add(Verdict::kFail, other, difference, "give all ranks the same file and settings");
  }
  return judgement;
}

// ---- Corpus

Facts probe_corpus(const Subject& subject) {
  const std::string& folder = subject.config().data().corpus();
  if (folder.empty()) fail(ExitCode::kConfig, "data.corpus is not set; name a folder");
  const Corpus corpus(folder);
  for (const configs::CorpusManifest::Split& split : corpus.manifest().split()) {
    const auto read_from = [&](const auto& arrays) {
      for (const auto& array : arrays) {
        if (array.shard_size() > 0)
          read_one_byte((corpus.folder() / array.shard(0).file()).string());
      }
    };
    read_from(split.stream());
    read_from(split.record());
  }
  return {{"fingerprint", corpus.manifest().fingerprint()}};
}

Judgement judge_corpus(const Answers& answers) {
  Judgement judgement;
  judgement.summary =
      add_minority(judgement, Verdict::kFail, answers, "fingerprint", "corpus ",
                   "copy the same corpus to all hosts, or name a shared folder in data.corpus") +
      ", readable on all ranks";
  return judgement;
}

// ---- GPUs

Facts probe_gpus(const Subject& subject) {
  if (subject.config().device() != configs::Config::cuda) return {{"gpu", ""}};
  const at::Device device = cuda_device(subject.world.local_rank());
  return {{"gpu", gpu_uuid(device)},
          {"name", device_name(device)},
          {"shared", !variable("BIRKHOFF_SHARE_GPUS").empty()}};
}

Judgement judge_gpus(const Answers& answers) {
  // The check of the configuration names ranks with another `device`.
  Answers with_gpu;
  std::map<std::string, std::vector<const Answer*>> users;
  for (const Answer& answer : answers) {
    const std::string gpu = answer.facts.value("gpu", "");
    if (gpu.empty()) continue;
    with_gpu.push_back(answer);
    users[gpu].push_back(&answer);
  }
  if (with_gpu.empty()) return {"none are used"};
  Judgement judgement;
  judgement.summary = add_minority(judgement, Verdict::kWarn, with_gpu, "name", "",
                                   "the slowest GPU sets the pace: use GPUs of one kind") +
                      ", one for each rank";
  for (const auto& [gpu, ranks] : users) {
    if (ranks.size() == 1 || ranks.front()->facts.value("shared", false)) continue;
    Finding finding{Verdict::kFail,
                    ranks.front()->host,
                    {},
                    fmt::format("share GPU {}", gpu),
                    "start one rank for each GPU, or let the launcher give each rank its own "
                    "(srun --gpus-per-task=1)"};
    for (const Answer* rank : ranks) finding.ranks.push_back(rank->rank);
    judgement.findings.push_back(finding);
  }
  return judgement;
}

}  // namespace birkhoff
