#include "runtime/reporting/run_history.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/slurm_environment.h"
#include "runtime/reporting/display_text.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr char kFormat[] = "birkhoff history";
constexpr int kVersion = 1;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;
constexpr std::chrono::seconds kStatusEvery{2};

// visit_fields() calls field(key, value) for the fields of a record, in the file's order.
template <typename Field>
void visit_fields(JobStart& start, const Field& field) {
  field("id", start.id);
  field("time", start.time);
  field("step", start.step);
  field("ranks", start.ranks);
  field("hosts", start.hosts);
  field("program", start.program);
  field("scheduler_job", start.scheduler_job);
}

template <typename Field>
void visit_fields(JobEnd& end, const Field& field) {
  field("time", end.time);
  field("step", end.step);
  field("step_seconds", end.step_seconds);
  field("code", end.code);
  field("reason", end.reason);
}

template <typename Field>
void visit_fields(SlowEpisode& episode, const Field& field) {
  SlowRank& slow = episode.slow;
  double busy_ms = 1000 * slow.seconds, usual_ms = 1000 * slow.usual;
  field("time", episode.time);
  field("step", slow.step);
  field("rank", slow.rank);
  field("host", slow.host);
  field("phase", slow.phase);
  field("busy_ms", busy_ms);
  field("usual_ms", usual_ms);
  slow.seconds = busy_ms / 1000;
  slow.usual = usual_ms / 1000;
}

template <typename Field>
void visit_fields(JobStatus& status, const Field& field) {
  field("time", status.time);
  field("step", status.step);
  field("steps", status.steps);
  field("saved_step", status.saved_step);
  field("tokens_per_second", status.tokens_per_second);
  field("step_seconds", status.step_seconds);
  field("save_seconds", status.save_seconds);
  field("host", status.host);
  field("process", status.process);
}

// `json` with the record's fields after its own.
template <typename Record>
ordered_json with_fields(ordered_json json, Record record) {
  visit_fields(record, [&json](const char* name, const auto& value) { json[name] = value; });
  return json;
}

// Fields that are missing or of another type keep their value.
template <typename T>
void read(const ordered_json& json, const char* name, T& value) {
  const auto found = json.find(name);
  if (found == json.end()) return;
  try {
    found->get_to(value);
  } catch (const ordered_json::exception&) {
  }
}

template <typename Record>
Record record_of(const ordered_json& json) {
  Record record;
  visit_fields(record, [&json](const char* name, auto& value) { read(json, name, value); });
  return record;
}

std::string line_of(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + '\n';
}

// Adds a line. A new file begins with its format. If a crash left an incomplete line, that line is
// ended first, and readers ignore it. Returns the error of the file system, or nothing.
std::string add_line(const fs::path& file, const ordered_json& json) {
  try {
    std::string text;
    if (!path_exists(file.string())) {
      text = line_of({{"format", kFormat}, {"version", kVersion}});
    } else {
      const std::string before = read_file(file.string(), kMaxBytes);
      if (!before.empty() && before.back() != '\n') text = "\n";
    }
    File out = File::open_for_append(file.string());
    out.write_all(text + line_of(json));
    out.sync();
    out.close();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// The end of a job that could not write it, from its last status.
JobEnd lost_end(const Job& job, const std::optional<JobStatus>& status, int code,
                const std::string& reason) {
  const bool is_of_job = status && status->time >= job.start.time;
  return {.time = is_of_job ? status->time : job.start.time,
          .step = is_of_job ? status->step : job.start.step,
          .step_seconds = is_of_job ? status->step_seconds : 0,
          .code = code,
          .reason = reason};
}

}  // namespace

std::string scheduler_job() {
  const std::optional<std::string> job = slurm_job_id();
  return job ? "slurm " + *job : "";
}

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::vector<Job> read_history(const fs::path& file) {
  std::vector<Job> jobs;
  if (!path_exists(file.string())) return jobs;
  const std::string text = read_file(file.string(), kMaxBytes);
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const ordered_json json = ordered_json::parse(text.substr(begin, end - begin), nullptr,
                                                  /*allow_exceptions=*/false);
    begin = end + 1;
    if (!json.is_object()) continue;
    std::string event, id;
    read(json, "event", event);
    read(json, "id", id);
    if (event == "start") jobs.push_back({record_of<JobStart>(json)});
    // The next job may have started before this one noted its end.
    const auto job = std::find_if(jobs.rbegin(), jobs.rend(),
                                  [&](const Job& other) { return other.start.id == id; });
    if (job == jobs.rend()) continue;
    if (event == "slow") job->slow.push_back(record_of<SlowEpisode>(json));
    if (event == "end" && !job->end) job->end = record_of<JobEnd>(json);
  }
  return jobs;
}

std::optional<JobStatus> read_status(const fs::path& file) {
  if (!path_exists(file.string())) return std::nullopt;
  const ordered_json json = ordered_json::parse(read_file(file.string(), kMaxBytes), nullptr,
                                                /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  return record_of<JobStatus>(json);
}

RunTotals totals_of(const std::vector<Job>& jobs, const std::optional<JobStatus>& status,
                    double now) {
  RunTotals totals;
  if (jobs.empty()) return totals;
  totals.restarts = static_cast<std::int64_t>(jobs.size()) - 1;
  totals.seconds = now - jobs.front().start.time;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const JobEnd end = jobs[i].end ? *jobs[i].end : lost_end(jobs[i], status, -1, "");
    const std::int64_t done = end.step - jobs[i].start.step;
    const std::int64_t kept_until =
        i + 1 < jobs.size() ? std::min(end.step, jobs[i + 1].start.step) : end.step;
    const std::int64_t kept = std::max<std::int64_t>(kept_until - jobs[i].start.step, 0);
    totals.lost_steps += done - kept;
    if (done > 0) {
      const double effective =
          end.step_seconds * static_cast<double>(kept) / static_cast<double>(done);
      totals.effective_seconds += effective;
      totals.lost_seconds += end.step_seconds - effective;
    }
  }
  return totals;
}

std::string note_lost_job(const fs::path& history, const fs::path& status, const std::string& id,
                          int code, const std::string& reason) {
  try {
    const std::vector<Job> jobs = read_history(history);
    if (jobs.empty() || jobs.back().end || (!id.empty() && jobs.back().start.id != id)) {
      return "";
    }
    JobEnd end = lost_end(jobs.back(), read_status(status), code, reason);
    if (!id.empty()) end.time = unix_seconds();
    return add_line(history, with_fields({{"event", "end"}, {"id", jobs.back().start.id}}, end));
  } catch (const Error& error) {
    return error.what();
  }
}

std::string note_slow_rank(const fs::path& history, const std::string& id,
                           const SlowEpisode& episode) {
  return add_line(history, with_fields({{"event", "slow"}, {"id", id}}, episode));
}

RunHistory::RunHistory(fs::path history, fs::path status, JobStart start, std::int64_t num_steps)
    : history_(std::move(history)),
      status_file_(std::move(status)),
      id_(start.id),
      status_({.step = start.step,
               .steps = num_steps,
               .saved_step = start.step,
               .host = host_name(),
               .process = ::getpid()}),
      next_write_(Clock::now()) {
  if (const auto before = read_status(status_file_)) status_.save_seconds = before->save_seconds;
  std::string problem =
      note_lost_job(history_, status_file_, "", -1, "the job was lost; nothing could note why");
  const std::string not_added = add_line(history_, with_fields({{"event", "start"}}, start));
  if (!not_added.empty()) problem = not_added;
  if (!problem.empty()) log_warning("{}", problem);
  write_status();
  next_write_ = Clock::now();  // after the first step, too
}

void RunHistory::saved(std::int64_t step, double seconds) {
  status_.saved_step = step;
  if (seconds > 0) status_.save_seconds = seconds;
}

void RunHistory::step(std::int64_t step, double step_ms, std::int64_t tokens) {
  status_.step = step;
  status_.step_seconds += step_ms / 1000;
  recent_ms_ += step_ms;
  recent_tokens_ += tokens;
  if (Clock::now() >= next_write_) write_status();
}

void RunHistory::end(int code, const std::string& reason) {
  if (std::exchange(ended_, true)) return;
  write_status();
  const JobEnd end{unix_seconds(), status_.step, status_.step_seconds, code, display_text(reason)};
  const std::string problem = add_line(history_, with_fields({{"event", "end"}, {"id", id_}}, end));
  if (!problem.empty()) log_warning("{}", problem);
}

void RunHistory::write_status() {
  status_.time = unix_seconds();
  if (recent_ms_ > 0) {
    status_.tokens_per_second = static_cast<double>(recent_tokens_) / recent_ms_ * 1000;
  }
  recent_ms_ = 0;
  recent_tokens_ = 0;
  next_write_ = Clock::now() + kStatusEvery;
  const ordered_json json = with_fields(ordered_json::object(), status_);
  try {
    replace_file(status_file_.string(), line_of(json));
    warned_ = false;
  } catch (const Error& error) {
    if (!std::exchange(warned_, true)) log_warning("{}", error.what());
  }
}

}  // namespace birkhoff
