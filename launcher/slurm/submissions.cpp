#include "launcher/slurm/submissions.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "launcher/slurm/batch_script.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr char kJobsFormat[] = "birkhoff jobs";
constexpr std::int64_t kMaxJobsBytes = 64 << 20, kMaxEndBytes = 64 << 10;

fs::path submissions_folder(const fs::path& run) { return absolute_run(run).string() + ".slurm"; }

// The folders of submissions by their numbers.
std::map<int, fs::path> submissions_of(const fs::path& run) {
  std::map<int, fs::path> found;
  const fs::path folder = submissions_folder(run);
  if (!path_exists(folder.string())) return found;
  for (const std::string& name : list_directory(folder.string())) {
    int number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error == std::errc() && end == name.data() + name.size()) found[number] = folder / name;
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

}  // namespace birkhoff
