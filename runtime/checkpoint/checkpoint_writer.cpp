#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/files/lease.h"
#include "data/tokenizers/tokenizer_file.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/finite_state.h"
#include "runtime/checkpoint/layout.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/whole_tensors.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using configs::CheckpointManifest;

}  // namespace

class CheckpointWriter::Impl {
 public:
  Impl(fs::path folder, Retention retention, const std::vector<fs::path>& extra_files,
       ProcessGroup& world, std::function<void()> require_folder)
      : folder_(std::move(folder)),
        retention_(retention),
        world_(world),
        require_folder_(std::move(require_folder)) {
    require(retention.newest >= 1, "a run keeps at least one checkpoint");
    if (world_.rank() == 0) {
      for (const fs::path& file : extra_files) {
        extra_files_[file.filename().string()] =
            read_file(file.string(), kTokenizerMaxBytes, ExitCode::kData);
      }
      make_directory(folder_.string());
      remove_leftovers(folder_);
    }
  }

  ~Impl() {
    abandon_ = true;
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  void save(const CheckpointHeader& header, const std::vector<TensorPart>& parts,
            const NotFinite& not_finite) {
    finish();
    const std::string tensor = stage(parts);
    if (!tensor.empty() && not_finite) not_finite(tensor);
    announce(header);
    const std::string model_name = my_model_file_name();
    const std::string state_name = state_file_name(world_.rank() + 1, world_.size());
    phase_ = Phase::kWriting;
    start_thread([this, model_name, state_name] {
      make_directory(aside_.string());  // folders may appear late on other machines
      CheckpointManifest written;
      write(model_name, model_tensors_, written);
      write(state_name, state_tensors_, written);
      sync_directory(aside_.string());
      written_ = written.SerializeAsString();
    });
  }

  std::optional<fs::path> poll() {
    if (phase_ == Phase::kIdle) {
      return std::nullopt;
    }
    const bool running = !thread_done_;
    if (!running && thread_.joinable()) {
      thread_.join();  // from here on the thread's writes are visible
    }
    at::Tensor vote = at::zeros({2}, at::kLong);  // [still running, exit code of a failure]
    vote.data_ptr<std::int64_t>()[0] = running;
    vote.data_ptr<std::int64_t>()[1] = running ? 0 : static_cast<std::int64_t>(failure_code_);
    world_.all_reduce(vote, ReduceOp::kMax, "checkpoint vote");
    if (vote.data_ptr<std::int64_t>()[0] != 0) {
      return std::nullopt;
    }
    if (vote.data_ptr<std::int64_t>()[1] != 0) {
      give_up(static_cast<ExitCode>(vote.data_ptr<std::int64_t>()[1]));
    }
    if (phase_ == Phase::kCommitting) {
      phase_ = Phase::kIdle;
      return folder_ / step_name(step_);
    }
    start_commit();
    return std::nullopt;
  }

  std::optional<fs::path> finish() {
    std::optional<fs::path> committed;
    while (phase_ != Phase::kIdle) {
      if (thread_.joinable()) {
        thread_.join();
      }
      committed = poll();
    }
    return committed;
  }

 private:
  enum class Phase { kIdle, kWriting, kCommitting };  // the same on all ranks

  // Copies what this rank writes into one host buffer, which grows only when the state does.
  // Returns the name of the first tensor that is not finite, or an empty one. Collective.
  std::string stage(const std::vector<TensorPart>& parts) {
    model_tensors_.clear();
    state_tensors_.clear();
    std::vector<const TensorPart*> owned;
    std::vector<TensorPart> checked;  // those that are not checked while they are copied here
    std::int64_t total_bytes = 0;
    for (const TensorPart& part : parts) {
      require(region_defect(part.region).empty() && part.owner >= 0 && part.owner < world_.size(),
              "a part with an impossible region or owner");
      require(part.data.numel() == part.region.flat_end - part.region.flat_begin &&
                  part.data.is_contiguous(),
              "a part's data must be contiguous and as long as its range");
      if (part.owner != world_.rank()) continue;
      const bool copied = is_written(part) && !is_cut(part);
      if (copied) owned.push_back(&part);
      if (!copied || !part.data.is_cpu()) checked.push_back(part);
    }
    const WholeTensors cut(world_, parts);
    const std::vector<TensorPart> collected = cut.mine();
    for (const TensorPart& part : collected) owned.push_back(&part);
    for (const TensorPart* part : owned) total_bytes += staged_bytes(*part);
    put_in_file_order(owned);
    if (!staging_.defined() || staging_.numel() < total_bytes) {
      staging_ = at::empty({total_bytes}, at::kByte);
    }
    std::string not_finite = find_non_finite(checked);
    std::vector<std::byte*> slots(collected.size());
    std::int64_t offset = 0;
    for (const TensorPart* part : owned) {
      const auto num_bytes = static_cast<std::int64_t>(part->data.nbytes());
      const at::Tensor slot = staging_.narrow(0, offset, num_bytes);
      auto* const bytes = static_cast<std::byte*>(slot.mutable_data_ptr());
      if (part->data.is_meta()) {
        slots[static_cast<std::size_t>(part - collected.data())] = bytes;
      } else if (!part->data.is_cpu()) {
        slot.view(part->data.scalar_type()).copy_(part->data);
      } else if (!all_finite(part->data, bytes) && not_finite.empty()) {
        not_finite = part->name;
      }
      auto& list = belongs_to_model(*part) ? model_tensors_ : state_tensors_;
      list.push_back(
          {manifest_entry(*part), static_cast<const std::byte*>(slot.data_ptr()), num_bytes});
      offset += staged_bytes(*part);
    }
    cut.collect([&](std::size_t i) { return slots[i]; });
    for (std::string& name : world_.all_gather_bytes(not_finite, "state that is not finite")) {
      if (!name.empty()) return std::move(name);
    }
    return "";
  }

  // Rank 0 announces the step and makes its folder; all ranks learn whether that worked.
  void announce(const CheckpointHeader& header) {
    std::string problem;
    if (world_.rank() == 0) {
      manifest_ = header;
      manifest_.set_format(kCheckpointFormat);
      manifest_.set_version(kCheckpointVersion);
      manifest_.set_block_bytes(kCrcBlockBytes);
      manifest_.set_ranks(world_.size());
      manifest_.clear_file();
      manifest_.clear_tensor();
      step_ = header.step();
      holder_ = header.holder();
      try {
        remove_tree(aside_folder().string());
        make_directory(aside_folder().string());
      } catch (const Error& error) {
        if (const std::string lost = why_lost(); !lost.empty()) throw FolderLost(lost);
        problem = error.what();
      }
    }
    at::Tensor which = at::zeros({2}, at::kLong);  // [step, holder]
    which.data_ptr<std::int64_t>()[0] = step_;
    which.data_ptr<std::int64_t>()[1] = holder_;
    world_.broadcast(which, 0, "checkpoint step");
    step_ = which.data_ptr<std::int64_t>()[0];
    holder_ = which.data_ptr<std::int64_t>()[1];
    aside_ = aside_folder();
    problem = world_.broadcast_bytes(problem, 0, "checkpoint folder");
    if (!problem.empty()) {
      fail_save(ExitCode::kStorage, 0, problem);
    }
  }

  // model-0000i-of-0000n: n ranks own whole parameters, and this one is the i-th of them.
  std::string my_model_file_name() {
    at::Tensor mine = at::zeros({1}, at::kLong);
    at::Tensor all = at::zeros({world_.size()}, at::kLong);
    mine.data_ptr<std::int64_t>()[0] = !model_tensors_.empty();
    world_.all_gather(all, mine, "checkpoint model files");
    const std::int64_t* owns = all.data_ptr<std::int64_t>();
    return model_file_name(std::count(owns, owns + world_.rank() + 1, 1),
                           std::count(owns, owns + world_.size(), 1));
  }

  // On the thread: writes one file, and adds its entries to `written`.
  void write(const std::string& name, std::vector<StagedTensor>& tensors,
             CheckpointManifest& written) {
    if (tensors.empty()) {
      return;
    }
    *written.add_file() = write_tensor_file(aside_, name, tensors, abandon_);
    for (const StagedTensor& tensor : tensors) {
      *written.add_tensor() = tensor.entry;
    }
  }

  // Call once all ranks have written: rank 0 gets their lists, and its thread commits.
  void start_commit() {
    const std::vector<std::string> lists = world_.all_gather_bytes(written_, "checkpoint files");
    phase_ = Phase::kCommitting;
    if (world_.rank() != 0) {
      return;
    }
    start_thread([this, lists] {
      for (const std::string& list : lists) {
        require(manifest_.MergeFromString(list), "a rank's list of checkpoint files");
      }
      commit_checkpoint(folder_, aside_, manifest_, extra_files_, retention_, require_folder_);
    });
  }

  // Call if some rank failed and no thread runs: throws the same error on all ranks.
  [[noreturn]] void give_up(ExitCode code) {
    phase_ = Phase::kIdle;
    const std::vector<std::string> failures =
        world_.all_gather_bytes(failure_, "checkpoint failure");
    const auto first = std::find_if(failures.begin(), failures.end(),
                                    [](const std::string& text) { return !text.empty(); });
    if (code == ExitCode::kUsage) throw FolderLost(*first);
    fail_save(code, static_cast<int>(first - failures.begin()), *first);
  }

  // Removes the save's files, as far as rank 0 can, and throws.
  [[noreturn]] void fail_save(ExitCode code, int rank, const std::string& why) const {
    if (world_.rank() == 0 && why_lost().empty()) {
      try {
        remove_leftovers(folder_);
      } catch (const Error&) {
        // The failure above is the one to report; the next start removes them.
      }
    }
    fail(code, "saving checkpoint {} failed on rank {}: {}; earlier checkpoints are untouched: {}",
         (folder_ / step_name(step_)).string(), rank, why,
         code == ExitCode::kStorage
             ? "free space on that file system or repair it, then start the same command again"
         : code == ExitCode::kMemory
             ? "free memory there or raise its limit, then start the same command again"
             : "report this defect");
  }

  // Whether a failure has this cause: the new holder removes the files of a save that runs.
  std::string why_lost() const {
    try {
      if (require_folder_) require_folder_();
    } catch (const FolderLost& lost) {
      return lost.what();
    } catch (const Error&) {  // not known; the failure itself is reported
    }
    return "";
  }

  template <typename Task>
  void start_thread(const Task& task) {
    failure_.clear();
    failure_code_ = ExitCode::kOk;
    thread_done_ = false;
    thread_ = std::thread([this, task] {
      try {
        task();
      } catch (const Error& error) {
        // Every failure here is a failure to store, whatever code the failed call gave; only our
        // own defects keep a code of their own.
        failure_ = error.what();
        failure_code_ =
            error.code() == ExitCode::kInternal ? ExitCode::kInternal : ExitCode::kStorage;
        if (const std::string lost = why_lost(); !lost.empty()) {
          failure_ = lost;
          failure_code_ = ExitCode::kUsage;
        }
      } catch (const std::bad_alloc&) {
        failure_ = "out of memory";
        failure_code_ = ExitCode::kMemory;
      } catch (const std::exception& error) {
        failure_ = error.what();
        failure_code_ = ExitCode::kInternal;
      }
      thread_done_ = true;
    });
  }

  // Named after the run's holder: a job that lost the run, and does not know it yet, must not touch
  // the files of the new holder's save of the same step.
  fs::path aside_folder() const {
    return folder_ / fmt::format("{}{}-by-{}", kAsidePrefix, step_name(step_), holder_);
  }

  const fs::path folder_;
  const Retention retention_;
  std::map<std::string, std::string> extra_files_;  // rank 0: content by name
  ProcessGroup& world_;
  const std::function<void()> require_folder_;  // rank 0

  Phase phase_ = Phase::kIdle;
  std::int64_t step_ = 0, holder_ = 0;
  fs::path aside_;
  CheckpointManifest manifest_;  // rank 0: of the running save

  // Written by the main thread before the thread starts and by the thread while it runs, never by
  // both at once.
  at::Tensor staging_;
  std::vector<StagedTensor> model_tensors_, state_tensors_;
  std::string written_;  // files and tensors of this rank: a serialized CheckpointManifest
  std::string failure_;
  ExitCode failure_code_ = ExitCode::kOk;

  std::atomic<bool> abandon_ = false;
  std::atomic<bool> thread_done_ = true;
  std::thread thread_;
};

CheckpointWriter::CheckpointWriter(fs::path folder, Retention retention,
                                   std::vector<fs::path> extra_files, ProcessGroup& world,
                                   std::function<void()> require_folder)
    : impl_(std::make_unique<Impl>(std::move(folder), retention, extra_files, world,
                                   std::move(require_folder))) {}
CheckpointWriter::~CheckpointWriter() = default;
void CheckpointWriter::save(const CheckpointHeader& header, const std::vector<TensorPart>& parts,
                            const NotFinite& not_finite) {
  impl_->save(header, parts, not_finite);
}
std::optional<fs::path> CheckpointWriter::poll() { return impl_->poll(); }
std::optional<fs::path> CheckpointWriter::finish() { return impl_->finish(); }

}  // namespace birkhoff
