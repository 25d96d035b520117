// Checks of the run's files: whether all ranks see one folder in which fsync, rename and flock do
// what checkpoints need, and whether there is space for the saves.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>

#include "cluster/base/files/file.h"
#include "data/corpus/corpus.h"
#include "launcher/doctor/probes.h"
#include "launcher/plan/rank_state.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxTrialBytes = std::int64_t{64} << 20;

// The run folder, or the nearest folder above it that exists.
std::string existing_folder(const fs::path& run) {
  std::string folder = run.string();
  while (!path_exists(folder)) folder = parent_path(folder);
  return folder;
}

// A name for a file or folder of a trial, which the trial removes.
std::string trial_path(const std::string& folder) {
  return fmt::format("{}/.birkhoff-doctor-{:08x}", folder, std::random_device()());
}

std::string size_text(double bytes) { return fmt::format("{:.3g} MB", bytes / 1e6); }

// The size of a checkpoint of this configuration.
std::int64_t checkpoint_bytes(const configs::Config& config) {
  const std::int64_t vocabulary = vocabulary_of(config, Corpus(config.data().corpus()));
  return saved_state(config, vocabulary, /*num_ranks=*/1).size.total();
}

// MB/s of a durable write of num_bytes, which also reveals quotas. Removes the file.
double write_trial(const std::string& folder, std::int64_t num_bytes) {
  const std::string path = trial_path(folder);
  const std::string bytes(static_cast<std::size_t>(num_bytes), 'x');
  const auto start = std::chrono::steady_clock::now();
  try {
    File file = File::create(path);
    file.write_all(bytes);
    file.sync();
    file.close();
  } catch (...) {
    remove_tree(path);
    throw;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  remove_file(path);
  return static_cast<double>(num_bytes) / 1e6 / seconds.count();
}

}  // namespace

// ---- Run folder

Facts probe_run_folder(const Subject& subject) {
  ProcessGroup& world = subject.world.group();
  std::string error;
  const auto attempt = [&error](const std::function<void()>& step) {
    if (!error.empty()) return;
    try {
      step();
    } catch (const Error& failure) {
      error = failure.what();
    }
  };
  // Rank 0 makes a folder, every rank a file in it.
  std::string trial;
  if (world.rank() == 0) {
    attempt([&] {
      trial = trial_path(existing_folder(*subject.run));
      make_directory(trial);
    });
  }
  trial = world.broadcast_bytes(error.empty() ? trial : "", 0, "doctor: trial folder");
  const bool made = !trial.empty();
  struct stat status {};
  bool sees = false;
  if (made) attempt([&] { sees = find_status(trial, /*follow_links=*/true, &status); });
  const std::string mine = fmt::format("{}/rank-{}", trial, world.rank()), lock = trial + "/lock";
  if (sees) {
    attempt([&] {
      File file = File::create(mine + ".new");
      file.write_all("doctor\n");
      file.sync();
      file.close();
      rename_path(mine + ".new", mine);
      // The lease of a run folder is a link (cluster/base/files/lease.h).
      std::error_code reason;
      fs::create_hard_link(mine, mine + ".link", reason);
      if (reason) {
        fail(ExitCode::kStorage, "no hard links in {} ({}); choose a --run on another file system",
             trial, reason.message());
      }
    });
  }
  // Rank 0 looks for the files and holds a lock, which the other ranks must see.
  std::optional<FileLock> held;
  if (made && world.rank() == 0)
    attempt([&] { held.emplace(lock, "the trial of the run folder"); });
  world.barrier("doctor: files are written");
  std::vector<std::string> names;
  if (made && world.rank() == 0) attempt([&] { names = list_directory(trial); });
  bool locked = false;
  if (sees) attempt([&] { locked = lock_holder(lock).has_value(); });
  world.barrier("doctor: files are seen");
  held.reset();
  if (made && world.rank() == 0) attempt([&] { remove_tree(trial); });
  if (!error.empty()) fail(ExitCode::kStorage, "{}", error);
  Facts facts = {{"made", made},
                 {"folder", trial.substr(0, trial.rfind('/'))},
                 {"sees", sees},
                 {"inode", fmt::to_string(status.st_ino)},
                 {"locked", locked}};
  if (world.rank() == 0) facts["names"] = names;
  return facts;
}

Judgement judge_run_folder(const Answers& answers) {
  const Answer& first = answers.front();
  if (!first.facts.at("made").get<bool>()) return {"rank 0 has made no folder for a trial"};
  const std::string folder = first.facts.at("folder").get<std::string>();
  Judgement judgement{folder + ": one folder for all ranks; fsync, rename and flock work"};
  constexpr const char* kShare =
      "mount the same shared file system on all hosts, or choose a --run there";
  const bool rank_0_has_failed = !first.facts.contains("names");  // it may have held no lock
  Answers seeing;
  for (const Answer& answer : answers) {
    if (!answer.facts.at("sees").get<bool>()) {
      judgement.add(Verdict::kFail, answer,
                    fmt::format("does not see what rank 0 writes in {}", folder), kShare);
      continue;
    }
    seeing.push_back(answer);
    if (!rank_0_has_failed && !answer.facts.at("locked").get<bool>()) {
      judgement.add(
          Verdict::kWarn, answer, fmt::format("locks (flock) in {} are not honoured", folder),
          "mount it with locks (Lustre: flock; NFS: local_lock=none): only the lease guards the "
          "folder, so a job may wait ten seconds for one that is gone");
    }
  }
  if (rank_0_has_failed) return judgement;
  const auto names = first.facts.at("names").get<std::vector<std::string>>();
  for (const Answer& answer : seeing) {
    const std::string file = fmt::format("rank-{}", answer.rank);
    if (std::find(names.begin(), names.end(), file) == names.end()) {
      judgement.add(Verdict::kFail, answer,
                    fmt::format("rank 0 does not see what it writes in {}", folder), kShare);
    }
  }
  add_minority(judgement, Verdict::kWarn, seeing, "inode", folder + " has inode ",
               "make sure that it is the same file system on all hosts");
  return judgement;
}

// ---- Space

Facts probe_space(const Subject& subject) {
  const std::string folder = existing_folder(*subject.run);
  const std::int64_t checkpoint = checkpoint_bytes(subject.config());
  const configs::Checkpoint& saves = subject.config().checkpoint();
  return {{"folder", folder},
          {"checkpoint", checkpoint},
          {"kept", saves.keep() + (saves.keep_best() ? 1 : 0) + 1},
          {"free", free_bytes(folder)},
          {"speed", write_trial(folder, std::min(checkpoint, kMaxTrialBytes))}};
}

Judgement judge_space(const Answers& answers) {
  const Answer& answer = answers.front();
  const double checkpoint = answer.facts.at("checkpoint").get<double>(),
               free = answer.facts.at("free").get<double>();
  const int kept = answer.facts.at("kept").get<int>();
  const std::string folder = answer.facts.at("folder").get<std::string>();
  Judgement judgement{fmt::format("{} free, {} a checkpoint, written at {:.0f} MB/s",
                                  size_text(free), size_text(checkpoint),
                                  answer.facts.at("speed").get<double>())};
  if (free >= checkpoint * kept) return judgement;
  // The space is the file system's, not the host's.
  judgement.add(free < checkpoint ? Verdict::kFail : Verdict::kWarn, "", {},
                fmt::format("{}: {} free, but {} of {} each are kept at a time", folder,
                            size_text(free), kept, size_text(checkpoint)),
                "free space there, choose another --run, or lower checkpoint.keep");
  return judgement;
}

}  // namespace birkhoff
