#include "launcher/slurm/run_jobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "configs/loader/message_text.h"
#include "launcher/processes/command_output.h"
#include "launcher/runs/run_summary.h"
#include "launcher/slurm/batch_script.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::chrono::seconds kSqueueLimit{30};
constexpr char kJobsFormat[] = "birkhoff jobs";
constexpr std::int64_t kMaxJobsBytes = 64 << 20, kMaxEndBytes = 64 << 10;

fs::path submissions_folder(const fs::path& run) { return absolute_run(run).string() + ".slurm"; }

// The folders of submissions by their numbers.
std::map<int, fs::path> submissions_of(const fs::path& run) {
  std::map<int, fs::path> found;
  const fs::path folder = submissions_folder(run);
  if (!path_exists(folder.string())) return found;
  for (const std::string& name : list_directory(folder.string())) {
    if (const auto number = parse_number<int>(name)) found[*number] = folder / name;
  }
  return found;
}

std::vector<SubmittedJob> read_jobs(const fs::path& submission) {
  const std::string file = (submission / "jobs.json").string();
  if (!path_exists(file)) return {};  // sbatch had failed, or has not ended yet
  std::vector<SubmittedJob> jobs;
  try {
    const auto json = ordered_json::parse(read_file(file, kMaxJobsBytes));
    if (json.at("format") != kJobsFormat) throw std::runtime_error("another format");
    for (const auto& job : json.at("jobs")) {
      const std::string id = job.at("id");
      jobs.push_back({id, job.at("run").get<std::string>(), job_output(submission, id),
                      job_end(submission, id)});
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    fail(ExitCode::kStorage,
         "{}: damaged: move its folder away; its jobs run on (`squeue --me` lists them)", file);
  }
  return jobs;
}

// This user's pending and running jobs. nullopt if squeue does not answer.
std::optional<std::vector<QueuedJob>> queued_jobs() {
  // %i id, %T state, %L time left, %N nodes, %r reason; an element of an array in a line of its
  // own.
  const CommandOutput output =
      output_of(squeue({"--me", "--array", "--format=%i|%T|%L|%N|%r"}), kSqueueLimit);
  if (output.code != 0) return std::nullopt;
  std::vector<QueuedJob> jobs;
  std::istringstream lines(output.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    QueuedJob job;
    for (std::string* field : {&job.id, &job.state, &job.time_left, &job.nodes}) {
      std::getline(fields, *field, '|');
    }
    if (std::getline(fields, job.reason)) jobs.push_back(job);
  }
  return jobs;
}

}  // namespace

fs::path absolute_run(const fs::path& run) {
  const fs::path path = fs::absolute(run).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

fs::path next_submission(const fs::path& run) {
  const std::map<int, fs::path> earlier = submissions_of(run);
  const int number = earlier.empty() ? 1 : earlier.rbegin()->first + 1;
  return submissions_folder(run) / std::to_string(number);
}

void write_jobs(const fs::path& submission, const std::vector<SubmittedJob>& jobs) {
  ordered_json list = ordered_json::array();
  for (const SubmittedJob& job : jobs) list.push_back({{"id", job.id}, {"run", job.run.string()}});
  const ordered_json json = {{"format", kJobsFormat}, {"version", 1}, {"jobs", list}};
  write_file_durably((submission / "jobs.json").string(),
                     json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + '\n');
}

std::optional<RecordedEnd> recorded_end(const SubmittedJob& job) {
  if (!path_exists(job.end.string())) return std::nullopt;
  std::istringstream file(read_file(job.end.string(), kMaxEndBytes));
  RecordedEnd end;
  if (!(file >> end.code >> std::ws)) return std::nullopt;  // the machine crashed then
  std::getline(file, end.text);
  return end;
}

std::vector<SubmittedJob> submitted_jobs(const fs::path& run) {
  const fs::path wanted = absolute_run(run);
  std::vector<SubmittedJob> jobs;
  for (const auto& [number, folder] : submissions_of(wanted)) {
    for (SubmittedJob& job : read_jobs(folder)) jobs.push_back(std::move(job));
  }
  for (const auto& [number, folder] : submissions_of(wanted.parent_path())) {  // of a sweep
    for (SubmittedJob& job : read_jobs(folder)) {
      if (job.run == wanted) jobs.push_back(std::move(job));
    }
  }
  return jobs;
}

std::vector<QueuedJob> jobs_with(const std::vector<QueuedJob>& queue,
                                 const std::vector<std::string>& ids) {
  std::vector<QueuedJob> found;
  std::copy_if(queue.begin(), queue.end(), std::back_inserter(found), [&](const QueuedJob& job) {
    return std::find(ids.begin(), ids.end(), job.id) != ids.end();
  });
  return found;
}

RunJobs known_jobs(const fs::path& run) {
  RunJobs jobs;
  jobs.submitted = submitted_jobs(run);
  if (jobs.submitted.empty()) return jobs;
  std::vector<std::string> ids;
  for (const SubmittedJob& job : jobs.submitted) ids.push_back(job.id);
  const auto queue = queued_jobs();
  jobs.squeue_answers = queue.has_value();
  if (queue) jobs.queued = jobs_with(*queue, ids);
  return jobs;
}

RunJobs jobs_of(const fs::path& run) {
  RunJobs jobs = known_jobs(run);
  if (jobs.submitted.empty() && !is_run(run)) {
    fail(ExitCode::kUsage,
         "{}: is not a run, and nothing was submitted for it: name a run's folder",
         quoted(run.string()));
  }
  return jobs;
}

std::vector<fs::path> runs_in(const fs::path& run, const RunJobs& jobs) {
  std::vector<fs::path> runs;
  for (const SubmittedJob& job : jobs.submitted) {
    if (std::find(runs.begin(), runs.end(), job.run) == runs.end()) runs.push_back(job.run);
  }
  return runs.empty() ? std::vector<fs::path>{absolute_run(run)} : runs;
}

}  // namespace birkhoff
