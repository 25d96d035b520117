// Weights of another model: found by name, converted, and reported.
#include "runtime/weights/warm_start.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "runtime/checkpoint/safetensors.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class WarmStart : public testing::Test {
 protected:
  // A file with tensors "a.b" [2, 3] in bf16, "a.c" [4] in fp64 and "n" [1] of integers, whose
  // values count from 1.
  std::string write_weights() {
    const std::string path = (folder_.path() / "w.safetensors").string();
    SafetensorsWriter writer(
        path, {{"a.c", "F64", {4}, 0, 0}, {"n", "I64", {1}, 0, 0}, {"a.b", "BF16", {2, 3}, 0, 0}},
        {});
    for (const auto& [count, type] :
         {std::pair(4, at::kDouble), std::pair(1, at::kLong), std::pair(6, at::kBFloat16)}) {
      const at::Tensor values = at::arange(1, count + 1, type);
      writer.write(values.data_ptr(), values.nbytes());
    }
    writer.finish();
    return path;
  }
  static std::vector<TensorPart> zero_parts() {
    return {whole_part("x.b", StateKind::kParameter, at::zeros({2, 3}), 0),
            whole_part("x.c", StateKind::kParameter, at::zeros({4}), 0)};
  }
  static WarmStartReport start(const std::string& from, std::vector<std::string> rules,
                               std::vector<TensorPart>& parts) {
    configs::WarmStart settings;
    settings.set_from(from);
    for (std::string& rule : rules) settings.add_rename(std::move(rule));
    return warm_start(settings, weight_files(from), parts);
  }
  static void expect_fails(const std::string& from, const std::vector<std::string>& rules,
                           ExitCode code, const std::string& words) {
    std::vector<TensorPart> parts = zero_parts();
    try {
      start(from, rules, parts);
      ADD_FAILURE() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  }

  const TestFolder folder_;
};

TEST_F(WarmStart, ReadsACheckpointWhateverMeshWroteIt) {
  save_step(folder_.path() / "checkpoints", 40, 3, Layout::kColumns);
  for (const auto& from : {folder_.path(), folder_.path() / "checkpoints/step-00000040"}) {
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<TensorPart> parts = make_parts(rank, 2, Layout::kFlatRanges);
      const WarmStartReport report = start(from.string(), {}, parts);
      EXPECT_EQ(report.taken, 5);  // with the empty tensor
      // Integers are counts of a run, and not weights.
      ASSERT_EQ(report.kept.size(), 1u);
      EXPECT_EQ(report.kept[0].first, "centroids.count");
      for (const std::string& name : differing_tensors(parts, 40)) {
        EXPECT_TRUE(name.starts_with("adamw.") || name == "centroids.count") << name;
      }
    }
  }
}

TEST_F(WarmStart, FindsTensorsByRulesAndConvertsThem) {
  std::vector<TensorPart> parts = zero_parts();
  const WarmStartReport report = start(write_weights(), {"x.=a."}, parts);
  EXPECT_EQ(report.taken, 2);
  EXPECT_TRUE(report.kept.empty());
  EXPECT_THAT(report.unused, ElementsAre("n"));
  EXPECT_TRUE(at::equal(parts[0].data, at::arange(1, 7, at::kFloat)));
  EXPECT_TRUE(at::equal(parts[1].data, at::arange(1, 5, at::kFloat)));
}

TEST_F(WarmStart, ReportsWhatKeepsItsValues) {
  std::vector<TensorPart> parts = zero_parts();
  parts.push_back(whole_part("x.d", StateKind::kParameter, at::zeros({4}), 0));
  parts.push_back(whole_part("y", StateKind::kParameter, at::zeros({5}), 0));
  parts.push_back(whole_part("z", StateKind::kParameter, at::zeros({1}), 0));
  // The first rule that fits applies.
  const WarmStartReport report = start(write_weights(), {"x.d=", "x.=a.", "y=a.c", "z=n"}, parts);
  EXPECT_EQ(report.taken, 2);
  EXPECT_THAT(report.kept, ElementsAre(std::pair("x.d", "left out by a rule"),
                                       std::pair("y", "a.c is [4] there, and [5] here"),
                                       std::pair("z", "n holds I64 there")));
  for (std::size_t i = 2; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].data.count_nonzero().item<std::int64_t>(), 0) << i;
  }
}

TEST_F(WarmStart, RefusesWhatHasNoEffect) {
  const std::string file = write_weights();
  expect_fails(file, {}, ExitCode::kConfig, "no tensor in " + file);
  expect_fails(file, {"x.=a.", "q=r"}, ExitCode::kConfig, "no tensor of this run begins with 'q'");
  const std::string none = (folder_.path() / "none").string();
  expect_fails(none, {}, ExitCode::kCheckpoint, none + ": there is no such file or folder");
  write_bytes(none, "no weights");
  expect_fails(none, {}, ExitCode::kCheckpoint, none);
  std::filesystem::create_directories(folder_.path() / "run/checkpoints");
  expect_fails((folder_.path() / "run").string(), {}, ExitCode::kCheckpoint,
               "the run has no checkpoint yet");
}

}  // namespace
}  // namespace birkhoff
