// Models that are divided over a tensor axis, as users run them: lost and stopped ranks of a 2 x 2
// mesh, and commands that compute with a divided model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/launcher/processes/train_process_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

std::vector<json> objects_of(const std::string& text) {
  std::vector<json> objects;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) objects.push_back(json::parse(line));
  return objects;
}

// `mesh` is a finished run on 2 x 2 ranks.
class MeshProcess : public TrainProcess {
 protected:
  static void SetUpTestSuite() {
    TrainProcess::SetUpTestSuite();
    const Finished trained = run_child(train_on_mesh("mesh"));
    ASSERT_EQ(trained.code, 0) << trained.err;
  }

  static Command train_on_mesh(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--ranks", "4", "--set", "mesh.tensor=2", "--set", "train.steps=200"});
    return train(name, more);
  }
  // The standard output of a command that succeeds.
  static std::string out_of(const std::vector<std::string>& arguments) {
    const Finished finished = run_child({.line = birkhoff_line(arguments)});
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished.out;
  }
  static void expect_refused(const std::vector<std::string>& arguments, int code,
                             const std::string& message) {
    const Finished finished = run_child({.line = birkhoff_line(arguments)});
    EXPECT_EQ(finished.code, code) << finished.err;
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
    EXPECT_THAT(finished.err, HasSubstr(message));
  }
};

// ---- Faults

TEST_F(MeshProcess, LostRanksAreStartedAgain) {
  const std::string name = "lost";
  Child child(train_on_mesh(name, {"--restarts", "1"}));
  for (const auto& [saved, victim] :
       {std::pair("step-00000050", 1), std::pair("step-00000100", 2)}) {
    while (child.is_running() && !fs::exists(run(name) / "checkpoints" / saved)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    signal_rank(run(name), victim, SIGKILL);
  }
  const Finished finished = child.finish();
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("starting again from the checkpoint of step 50"),
                                  HasSubstr("starting again from the checkpoint of step 100")));
  expect_like_reference(name, "mesh");
}

// Rank 1 shares a replica with rank 0, rank 2 does not.
TEST_F(MeshProcess, AStoppedRankIsNamedAndTheRunGoesOn) {
  for (const int victim : {1, 2}) {
    const std::string name = "stopped" + std::to_string(victim);
    SCOPED_TRACE(name);
    Child child(train_on_mesh(name, {"--set", "watchdog.seconds=3"}));
    ASSERT_TRUE(wait_for_step(child, run(name), 60));
    signal_rank(run(name), victim, SIGSTOP);
    const Finished finished = child.finish(seconds(60));
    EXPECT_EQ(finished.code, 8) << finished.err;
    EXPECT_THAT(finished.err, AllOf(HasSubstr("birkhoff: rank " + std::to_string(victim) + " on "),
                                    HasSubstr("in step "), HasSubstr("silent for")));
    EXPECT_TRUE(wait_until_none(run(name), seconds(5))) << "nothing is left running";
    EXPECT_EQ(run_child(train_on_mesh(name)).code, 0);
    expect_like_reference(name, "mesh");
  }
}

// ---- Commands. A divided model's sums have another order: results differ by rounding.

TEST_F(MeshProcess, ADividedModelIsEvaluated) {
  const auto eval = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "mesh", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return out_of(arguments);
  };
  const std::string divided = eval({"--ranks", "2", "--tensor", "2"});
  const json result = json::parse(divided), whole = json::parse(eval({}));
  EXPECT_NEAR(result["loss"].get<double>(), whole["loss"].get<double>(), 1e-5);
  EXPECT_EQ(result["tokens"], whole["tokens"]);
  EXPECT_EQ(eval({"--ranks", "4", "--tensor", "2"}), divided) << "replicas change no bit";
}

TEST_F(MeshProcess, ADividedModelGeneratesAndScores) {
  const std::vector<std::string> sample = {"sample",   "mesh", "--prompt",      "the ",
                                           "--tokens", "60",   "--temperature", "0"};
  std::vector<std::string> divided = sample;
  divided.insert(divided.end(), {"--tensor", "2"});
  EXPECT_EQ(out_of(divided), out_of(sample)) << "printed once";

  std::string prompts, texts;
  for (int i = 0; i < 9; ++i) {
    const std::string word =
        std::string("the quick fox").substr(0, 4 + static_cast<std::size_t>(i));
    prompts += word + "\n";
    texts += json{{"text", word}}.dump() + "\n";
  }
  write_bytes("prompts.txt", prompts);
  write_bytes("texts.jsonl", texts);
  const std::vector<std::string> on_mesh = {"--ranks", "4", "--tensor", "2"};
  std::vector<std::string> generate = {"generate", "mesh",         "--input", "prompts.txt",
                                       "--json",   "--max-tokens", "8"},
                           score = {"score", "mesh", "--input", "texts.jsonl"};
  const std::vector<json> generated = objects_of(out_of(generate)),
                          scored = objects_of(out_of(score));
  for (auto* line : {&generate, &score}) line->insert(line->end(), on_mesh.begin(), on_mesh.end());
  const std::vector<json> generated_divided = objects_of(out_of(generate)),
                          scored_divided = objects_of(out_of(score));
  ASSERT_EQ(generated_divided.size(), 9u);
  ASSERT_EQ(scored_divided.size(), 9u);
  for (std::size_t i = 0; i < 9; ++i) {
    EXPECT_EQ(generated_divided[i]["text"], generated[i]["text"]);
    for (const auto& [all, key] :
         {std::pair(std::pair(&generated_divided, &generated), "log_probability"),
          std::pair(std::pair(&scored_divided, &scored), "log_likelihood")}) {
      EXPECT_NEAR((*all.first)[i][key].get<double>(), (*all.second)[i][key].get<double>(), 1e-4);
    }
  }
}

// The user's own mpirun starts the ranks.
TEST_F(MeshProcess, RanksOfALauncherShareAModel) {
  const auto on_ranks = [](int ranks, const std::vector<std::string>& arguments) {
    std::vector<std::string> line = {"mpirun",          "-n",        std::to_string(ranks),
                                     "--oversubscribe", "--bind-to", "none"};
    const std::vector<std::string> birkhoff = birkhoff_line(arguments);
    line.insert(line.end(), birkhoff.begin(), birkhoff.end());
    return run_child({.line = line,
                      .environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                      {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}});
  };
  const std::vector<std::string> sample = {"sample",   "mesh", "--prompt",      "the ",
                                           "--tokens", "20",   "--temperature", "0"};
  std::vector<std::string> divided = sample;
  divided.insert(divided.end(), {"--tensor", "2"});
  EXPECT_EQ(on_ranks(2, divided).out, out_of(sample));
  const Finished too_many = on_ranks(3, divided);
  EXPECT_EQ(too_many.code, 2);
  EXPECT_THAT(too_many.err, HasSubstr("--tensor 2: the model is divided over all ranks that were "
                                      "started, and these are 3"));
  EXPECT_THAT(on_ranks(3, {"eval", "mesh", "--tensor", "2"}).err,
              HasSubstr("--tensor 2: does not divide 3 ranks; start a multiple of 2"));
}

TEST_F(MeshProcess, ADividedModelPrintsBytesAsTheyAre) {
  const Finished prepared = run_child(
      {.line = birkhoff_line({"prepare", "--out", "bytes", "--valid", "0.2", "text.txt"})});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
  ASSERT_EQ(
      run_child(train("bytes_run", {"--set", "data.corpus=bytes", "--set", "train.steps=1"})).code,
      0);
  const std::vector<std::string> sample = {"sample", "bytes_run", "--prompt",
                                           "a",      "--tokens",  "100"};
  std::vector<std::string> divided = sample;
  divided.insert(divided.end(), {"--tensor", "2"});
  const std::string whole = out_of(sample);
  EXPECT_TRUE(std::any_of(whole.begin(), whole.end(), [](char c) { return c > 0 && c < 9; }));
  EXPECT_EQ(out_of(divided), whole);
}

TEST_F(MeshProcess, WhatCannotBeDividedIsRefused) {
  expect_refused({"eval", "mesh", "--tensor", "2"}, 2,
                 "--tensor 2: does not divide 1 rank; start a multiple of 2");
  expect_refused({"eval", "mesh", "--ranks", "4", "--tensor", "4"}, 3,
                 "--tensor 4: mesh.tensor: 4 does not divide model.attention.0.group.0.heads 2");
  expect_refused({"sample", "mesh", "--prompt-file", "-", "--tensor", "2"}, 2,
                 "--prompt-file -: standard input is read by one process");
}

}  // namespace
}  // namespace birkhoff
