#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <list>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "launcher/commands.h"
#include "launcher/output.h"
#include "launcher/runs/run_summary.h"
#include "launcher/slurm/run_jobs.h"
#include "runtime/checkpoint/run_folder.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kTailLook{500};
constexpr std::chrono::seconds kAskSlurm{
    10};  // not shorter: a cluster's controller serves all of its users

// "step 20: loss 2.3026, 1500 tokens/s" or "step 20: valid loss 2.4001". Other lines: as they are.
std::string metrics_text(const std::string& line) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto number = [&json](const char* name) {
    return json.contains(name) && json[name].is_number() ? json[name].get<double>() : kUnknown;
  };
  if (!json.is_object()) return line;
  if (json.contains("split") && json["split"].is_string()) {
    return fmt::format("step {}: {} loss {}", whole_text(number("step")),
                       json["split"].get<std::string>(), loss_text(number("loss")));
  }
  return fmt::format("step {}: loss {}, {} tokens/s", whole_text(number("step")),
                     loss_text(number("loss")), whole_text(number("tokens_per_second")));
}

// A file that grows, read in whole lines.
class GrowingFile {
 public:
  GrowingFile(fs::path path, bool is_metrics) : path_(std::move(path)), is_metrics_(is_metrics) {}
  const fs::path& path() const { return path_; }

  // The lines since the last call. If the file was cut since then, as a resumed run does with its
  // metrics, reading continues from its end.
  std::vector<std::string> more() {
    std::ifstream file(path_, std::ios::binary | std::ios::ate);
    if (!file) return {};
    const std::streamoff size = file.tellg();
    if (size < offset_) offset_ = size;
    file.seekg(offset_);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line) && !file.eof();) {
      offset_ += static_cast<std::streamoff>(line.size()) + 1;
      lines.push_back(is_metrics_ ? metrics_text(line) : line);
    }
    return lines;
  }

 private:
  fs::path path_;
  bool is_metrics_;
  std::streamoff offset_ = 0;
};

// The printed files of a run: the outputs of its jobs or, if none was submitted, the log of its
// first rank; and its metrics.
class Followed {
 public:
  Followed(const fs::path& run, std::ostream& out) : run_(run), out_(out) {
    files_.emplace_back(RunPaths{run}.metrics(), /*is_metrics=*/true);
  }

  // Adds the outputs of queued jobs; at the first call, also the newest existing output.
  void add(const RunJobs& jobs) {
    if (jobs.submitted.empty() && files_.size() == 1) {
      files_.emplace_back(RunPaths{run_}.log(0), /*is_metrics=*/false);
    }
    std::vector<fs::path> outputs;
    for (const SubmittedJob& job : jobs.submitted) {
      if (job.run == run_) outputs.push_back(job.output);
    }
    if (num_added_ == 0) {
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (path_exists(outputs[i].string())) num_added_ = i;
      }
    }
    for (; num_added_ < outputs.size(); ++num_added_) {
      files_.emplace_back(outputs[num_added_], /*is_metrics=*/false);
    }
  }

  // Prints the new lines of the files, at most `most` lines of each.
  void print(std::size_t most) {
    for (GrowingFile& file : files_) {
      const std::vector<std::string> lines = file.more();
      if (lines.empty() || most == 0) continue;
      if (printed_ != &file) {
        out_ << "==> " << terminal_text(fs::path(file.path()).filename().string()) << " <==\n";
        printed_ = &file;
      }
      for (std::size_t i = lines.size() - std::min(lines.size(), most); i < lines.size(); ++i) {
        out_ << terminal_text(lines[i]) << '\n';
      }
    }
    flush_output(out_);
  }

 private:
  fs::path run_;
  std::ostream& out_;
  std::list<GrowingFile> files_;
  std::size_t num_added_ = 0;  // outputs, of all that jobs of the run have
  const GrowingFile* printed_ = nullptr;
};

// Whether more output may come: a process trains in the folder, or a job is in the queue.
bool is_active(const fs::path& run, const RunJobs& jobs) {
  return !jobs.queued.empty() || run_holder(RunPaths{run}).has_value();
}

}  // namespace

int tail_command(const TailArguments& arguments, std::ostream& out, std::ostream&) {
  using Clock = std::chrono::steady_clock;
  RunJobs jobs = jobs_of(arguments.run);
  const std::vector<fs::path> runs = runs_in(arguments.run, jobs);
  if (runs.size() > 1) {
    fail(ExitCode::kUsage, "{}: is a sweep of {} runs: name one of them, such as {}", arguments.run,
         runs.size(), runs[0].string());
  }
  const fs::path& run = runs[0];
  Followed followed(run, out);
  followed.add(jobs);
  followed.print(static_cast<std::size_t>(arguments.lines));
  Clock::time_point next_question = Clock::now();
  while (arguments.follow) {
    if (Clock::now() >= next_question) {
      RunJobs now = jobs_of(arguments.run);
      if (!now.squeue_answers) now.queued = jobs.queued;
      jobs = std::move(now);
      next_question = Clock::now() + kAskSlurm;
      followed.add(jobs);
    }
    // Checked before the files are read, so that their last lines are read after the end.
    const bool more = is_active(run, jobs);
    followed.print(std::numeric_limits<std::size_t>::max());
    if (!more) break;
    std::this_thread::sleep_for(kTailLook);
  }
  return 0;
}

}  // namespace birkhoff
