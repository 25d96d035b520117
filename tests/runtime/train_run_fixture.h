// Whole runs of a small model on the ranks of the test.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "configs/loader/config_io.h"
#include "data/prepare/prepare.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/train_run.h"
#include "tests/cluster/mpi_test_main.h"

namespace birkhoff {

// A folder that all ranks see, with two small corpora; removed at the end.
class TrainRunMpi : public testing::Test {
 protected:
  void SetUp() override {
    setenv("BIRKHOFF_SHARE_GPUS", "1", /*overwrite=*/1);
    std::string name = (std::filesystem::temp_directory_path() / "birkhoff-run-XXXXXX").string();
    if (rank() == 0) {
      folder_ = mkdtemp(name.data());
      prepare("corpus", 7);
      prepare("other", 8);
    }
    folder_ = test_world().group().broadcast_bytes(folder_.string(), 0, "test folder");
  }
  void TearDown() override {
    test_world().group().barrier("end of the test");
    if (rank() == 0) std::filesystem::remove_all(folder_);
  }

  static int rank() { return test_world().rank(); }

  void prepare(const std::string& name, unsigned modulus) const {
    std::ofstream text(folder_ / (name + ".txt"));
    for (unsigned i = 0; i < 3000; ++i) text << "abcdefgh ijklm\n"[i * i % modulus + i % 8];
    text.close();
    PrepareOptions options;
    options.out = (folder_ / name).string();
    options.paths = {(folder_ / (name + ".txt")).string()};
    prepare_corpus(options);
  }

  configs::Config config(int steps, std::vector<std::string> settings = {}) const {
    settings.insert(settings.begin(),
                    {"data.corpus=" + (folder_ / "corpus").string(),
                     "train.steps=" + std::to_string(steps), "device=" BIRKHOFF_TEST_DEVICE});
    return parse_config(R"(
        task { language_model {} }
        data { sequence_length: 16 }
        model { layers: 1 channels: 16 heads: 2 dropout { residual: 0.1 } }
        train {
          global_batch: 8 micro_batch: 2 bucket_elements: 1000
          schedule { shape: constant warmup_steps: 2 }
        }
        checkpoint { every: 5 }
        evaluate { every: 4 micro_batch: 4 }
        metrics { every: 2 })",
                        "test", settings);
  }

  Outcome train(const configs::Config& config, const std::string& run) const {
    const StopSignals signals;
    return train(config, run, signals);
  }
  Outcome train(const configs::Config& config, const std::string& run,
                const StopSignals& signals) const {
    StopRequest stop(signals);
    const Outcome outcome =
        run_training(config, folder_ / run, false, test_world(),
                     {stop, [](const Diagnosis& diagnosis) { ADD_FAILURE() << diagnosis.text; }});
    test_world().group().barrier("end of a run");
    return outcome;
  }

  // What the run computed: every figure except the times.
  std::vector<nlohmann::json> figures(const std::string& run) const {
    std::vector<nlohmann::json> lines;
    std::ifstream in(folder_ / run / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      lines.push_back(nlohmann::json::parse(line));
      lines.back().erase("step_ms");
      lines.back().erase("loader_wait_ms");
      lines.back().erase("tokens_per_second");
      lines.back().erase("elapsed_seconds");
    }
    return lines;
  }

  // Tensor checksums of a run's newest checkpoint, by name and range.
  std::map<std::string, std::uint32_t> checksums(const std::string& run) const {
    std::map<std::string, std::uint32_t> all;
    const auto checkpoint = find_newest_checkpoint(folder_ / run / "checkpoints", false);
    if (!checkpoint) return all;
    for (const auto& tensor : checkpoint->manifest.tensor()) {
      all[tensor.name() + "@" + std::to_string(tensor.flat_begin())] = tensor.crc32c();
    }
    return all;
  }

  // Each figure of `run` equals that of `expected` up to rounding.
  void expect_same_figures(const std::string& run, const std::string& expected) const {
    if (rank() != 0) return;
    const auto mine = figures(run), of_expected = figures(expected);
    ASSERT_EQ(mine.size(), of_expected.size());
    ASSERT_GT(mine.size(), 5u);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      ASSERT_EQ(mine[i].size(), of_expected[i].size()) << mine[i];
      for (const auto& [key, value] : of_expected[i].items()) {
        if (!value.is_number()) continue;
        EXPECT_NEAR(mine[i].at(key).get<double>(), value.get<double>(),
                    1e-10 * std::max(1.0, std::abs(value.get<double>())))
            << key << " of " << mine[i];
      }
    }
  }

  void expect_error(const std::function<void()>& action, ExitCode code,
                    const std::string& what) const {
    try {
      action();
      ADD_FAILURE() << "no error: " << what;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
    test_world().group().barrier("after an error");
  }

  std::filesystem::path folder_;
};

}  // namespace birkhoff
