// Runs of the real program on a small corpus, in the test suite's own folder.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/training.h"

namespace birkhoff {

// The working directory holds text.txt, tiny.txtpb, corpus/ and the finished run `reference` of two
// ranks.
class TrainProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_train");
    std::filesystem::current_path(folder_->path());
    write_bytes("text.txt", some_text(6000, 1));
    write_bytes("tiny.txtpb", tiny_training());
    setenv("OMP_NUM_THREADS", "1", 1);
    const Finished prepared =
        run_child({.line = birkhoff_line({"prepare", "--out", "corpus", "--tokenizer", "chars",
                                          "--valid", "0.2", "text.txt"})});
    ASSERT_EQ(prepared.code, 0) << prepared.err;
    const Finished trained = run_child(train("reference", {"--ranks", "2"}));
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  static void TearDownTestSuite() {
    std::filesystem::current_path("/");
    delete folder_;
  }

  void TearDown() override {
    for (const auto& entry : std::filesystem::directory_iterator(folder_->path())) {
      if (std::filesystem::exists(entry.path() / "run.json")) kill_all(processes_of(entry.path()));
    }
  }

  static std::filesystem::path run(const std::string& name) { return folder_->path() / name; }

  static Command train(const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"train", "tiny.txtpb", "--run", run(name).string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return {.line = birkhoff_line(arguments)};
  }
  // The same, started with mpirun by hand.
  static Command mpirun(int ranks, const std::string& name,
                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> line = {"mpirun",          "-n",        std::to_string(ranks),
                                     "--oversubscribe", "--bind-to", "none"};
    const Command command = train(name, more);
    line.insert(line.end(), command.line.begin(), command.line.end());
    return {
        .line = line,
        .environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}};
  }

  // Expects that the run is complete and equals an uninterrupted one bit for bit.
  static void expect_like_reference(const std::string& name,
                                    const std::string& reference_name = "reference") {
    const std::filesystem::path reference_run = run(reference_name);
    EXPECT_EQ(checkpoint_names(run(name)).back(), checkpoint_names(reference_run).back());
    const auto state = final_state(run(name)), reference = final_state(reference_run);
    ASSERT_GE(reference.size(), 2u) << "model and optimizer";
    ASSERT_EQ(state.size(), reference.size());
    for (const auto& [file, bytes] : reference)
      EXPECT_TRUE(state.at(file) == bytes) << file << " differs";
    expect_metrics_like(name, reference_name);
  }
  static void expect_metrics_like(const std::string& name, const std::string& reference) {
    const MetricsLines metrics = lines_of_metrics(run(name)),
                       expected = lines_of_metrics(run(reference));
    EXPECT_EQ(metrics.figures, expected.figures)
        << "each step once, in order, with the same figures";
    EXPECT_EQ(metrics.evaluated, expected.evaluated);
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

}  // namespace birkhoff
