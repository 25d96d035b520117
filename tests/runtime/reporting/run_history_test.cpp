// The history of a run: the notes of its jobs, the notes for lost jobs, and the cost of a damaged
// file.
#include "runtime/reporting/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "cluster/base/files/file.h"
#include "runtime/checkpoint/run_folder.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

JobStart start_at(std::int64_t step, const std::string& id) {
  return {.time = unix_seconds(),
          .step = step,
          .ranks = 4,
          .hosts = {"a", "b"},
          .program = "1.2",
          .scheduler_job = "slurm 17",
          .id = id};
}

// A job that starts at `step` and does `steps` steps of 1 s.
RunHistory job(const RunPaths& run, std::int64_t step, std::int64_t steps, const std::string& id) {
  RunHistory history(run.history(), run.status(), start_at(step, id), 1000);
  history.saved(step, 0.5);
  for (std::int64_t i = 1; i <= steps; ++i) history.step(step + i, 1000, 50);
  return history;
}

void append(const std::filesystem::path& file, const std::string& text) {
  std::ofstream(file, std::ios::app) << text;
}

TEST(RunHistory, KeepsWhatJobsNote) {
  const TestFolder folder;
  const RunPaths run{folder};
  EXPECT_THAT(read_history(run.history()), ElementsAre());
  EXPECT_FALSE(read_status(run.status()));
  job(run, 0, 120, "first").end(7, "a rank\nwas lost");
  job(run, 100, 200, "second").end(0, "finished");
  const std::vector<Job> jobs = read_history(run.history());
  ASSERT_EQ(jobs.size(), 2u);
  EXPECT_EQ(jobs[0].start.step, 0);
  EXPECT_EQ(jobs[0].start.ranks, 4);
  EXPECT_THAT(jobs[0].start.hosts, ElementsAre("a", "b"));
  EXPECT_EQ(jobs[0].start.program, "1.2");
  EXPECT_EQ(jobs[0].start.scheduler_job, "slurm 17");
  ASSERT_TRUE(jobs[0].end && jobs[1].end);
  EXPECT_EQ(jobs[0].end->step, 120);
  EXPECT_EQ(jobs[0].end->step_seconds, 120);
  EXPECT_EQ(jobs[0].end->code, 7);
  EXPECT_EQ(jobs[0].end->reason, "a rank?was lost") << "one line";
  EXPECT_EQ(jobs[1].end->step, 300);
  const std::optional<JobStatus> status = read_status(run.status());
  ASSERT_TRUE(status);
  EXPECT_EQ(status->step, 300);
  EXPECT_EQ(status->steps, 1000);
  EXPECT_EQ(status->saved_step, 100);
  EXPECT_EQ(status->save_seconds, 0.5);
  EXPECT_EQ(status->tokens_per_second, 50);

  // Steps 101 to 120 were done twice. Of the first job's 120 s, 100 count.
  const RunTotals totals = totals_of(jobs, status, jobs[0].start.time + 400);
  EXPECT_EQ(totals.restarts, 1);
  EXPECT_EQ(totals.lost_steps, 20);
  EXPECT_DOUBLE_EQ(totals.effective_seconds, 300);
  EXPECT_DOUBLE_EQ(totals.lost_seconds, 20);
  EXPECT_NEAR(totals.seconds, 400, 1e-6);
}

TEST(RunHistory, TheNextJobNotesTheEndOfALostOne) {
  const TestFolder folder;
  const RunPaths run{folder};
  job(run, 0, 30, "lost").step(31, 1000, 50);  // killed: no end; its status is of its start
  job(run, 25, 5, "next").end(0, "finished");
  const std::vector<Job> jobs = read_history(run.history());
  ASSERT_EQ(jobs.size(), 2u);
  ASSERT_TRUE(jobs[0].end);
  EXPECT_EQ(jobs[0].end->code, -1);
  EXPECT_THAT(jobs[0].end->reason, HasSubstr("lost"));
  EXPECT_GE(jobs[0].end->time, jobs[0].start.time);
  EXPECT_LE(jobs[0].end->step, 31) << "the last status may be older than the last step";
}

TEST(RunHistory, ALauncherNotesTheEndOfItsOwnJobOnly) {
  const TestFolder folder;
  const RunPaths run{folder};
  EXPECT_EQ(note_lost_job(run.history(), run.status(), "none", 7, "lost"), "");
  EXPECT_FALSE(path_exists(run.history().string())) << "there was no job";
  job(run, 0, 3, "ours");
  EXPECT_EQ(note_lost_job(run.history(), run.status(), "another", 7, "lost"), "");
  EXPECT_FALSE(read_history(run.history())[0].end);
  EXPECT_EQ(note_lost_job(run.history(), run.status(), "ours", 7, "lost"), "");
  EXPECT_EQ(note_lost_job(run.history(), run.status(), "ours", 8, "again"), "");
  const std::vector<Job> jobs = read_history(run.history());
  ASSERT_TRUE(jobs[0].end);
  EXPECT_EQ(jobs[0].end->code, 7) << "the first end stays";
}

// A job notes its end when it no longer holds the run's lock.
TEST(RunHistory, AnEndBelongsToItsJobAlsoAfterTheNextStart) {
  const TestFolder folder;
  const RunPaths run{folder};
  RunHistory first = job(run, 0, 10, "first"), second = job(run, 10, 5, "second");
  first.end(75, "stopped on request");
  const std::vector<Job> jobs = read_history(run.history());
  ASSERT_EQ(jobs.size(), 2u);
  EXPECT_EQ(jobs[0].end->code, -1) << "noted by the second job, which found none";
  EXPECT_FALSE(jobs[1].end);
  second.end(0, "finished");
  EXPECT_EQ(read_history(run.history())[1].end->code, 0);
}

TEST(RunHistory, DamagedLinesCostOnlyThemselves) {
  const TestFolder folder;
  const RunPaths run{folder};
  job(run, 0, 10, "first").end(0, "finished");
  append(run.history(), "not json\n[1]\n{\"event\":\"start\",\"ranks\":\"four\",\"step\":7}\n");
  append(run.history(), R"({"event":"start","id":"torn)");
  job(run, 10, 5, "second").end(0, "finished");
  const std::vector<Job> jobs = read_history(run.history());
  ASSERT_EQ(jobs.size(), 3u) << "the torn line is none";
  EXPECT_EQ(jobs[1].start.step, 7);
  EXPECT_EQ(jobs[1].start.ranks, 0) << "a field of another type is left out";
  EXPECT_EQ(jobs[2].start.id, "second");
  EXPECT_EQ(jobs[2].end->step, 15);
  append(run.status(), "damage");
  EXPECT_FALSE(read_status(run.status()));
}

TEST(RunHistory, FilesThatCannotBeWrittenDoNotEndTheRun) {
  const TestFolder folder;
  const RunPaths run{folder};
  set_file_fault_hook([&](const char* call, const std::string& path, std::int64_t) {
    const bool of_history =
        path.find("history") != std::string::npos || path.find("status") != std::string::npos;
    return of_history && std::string(call) == "open" ? ENOSPC : 0;
  });
  job(run, 0, 10, "first").end(0, "finished");
  EXPECT_THAT(note_lost_job(run.history(), run.status(), "", 7, "lost"), "") << "no job, no end";
  set_file_fault_hook({});
  EXPECT_FALSE(path_exists(run.history().string()));
  job(run, 0, 10, "second");
  set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
    return std::string(call) == "write" ? ENOSPC : 0;
  });
  EXPECT_THAT(note_lost_job(run.history(), run.status(), "", 7, "lost"), HasSubstr("write"));
  set_file_fault_hook({});
}

TEST(RunHistory, SlowRanksBelongToTheirJob) {
  const TestFolder folder;
  const RunPaths run{folder};
  RunHistory first = job(run, 0, 10, "first");
  const SlowRank slow{
      .rank = 3, .host = "b", .step = 7, .phase = "the update", .seconds = 0.3, .usual = 0.2};
  EXPECT_EQ(note_slow_rank(run.history(), "first", {unix_seconds(), slow}), "");
  first.end(7, "lost");
  job(run, 0, 10, "second").end(0, "finished");
  const std::vector<Job> jobs = read_history(run.history());
  ASSERT_EQ(jobs.size(), 2u);
  ASSERT_EQ(jobs[0].slow.size(), 1u);
  EXPECT_TRUE(jobs[0].end);
  EXPECT_TRUE(jobs[1].slow.empty());
  EXPECT_EQ(jobs[0].slow[0].slow.step, 7);
  EXPECT_THAT(jobs[0].slow[0].slow.text(),
              HasSubstr("rank 3 on b is slow: it takes 300.0 ms for a step without waiting for "
                        "others, 50 % more than the usual 200.0 ms, most of it in the update"));
}

}  // namespace
}  // namespace birkhoff
