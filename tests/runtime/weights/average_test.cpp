// The mean of checkpoints: values, what else it holds, and what is refused.
#include "runtime/weights/average.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

std::vector<TensorPart> model_parts(const std::vector<TensorPart>& parts) {
  std::vector<TensorPart> of_model;
  for (const TensorPart& part : parts) {
    if (part.kind != StateKind::kOptimizer) of_model.push_back(part);
  }
  return of_model;
}

std::vector<CheckpointFolder> saved(const TestFolder& folder, const std::vector<int>& steps) {
  std::vector<CheckpointFolder> checkpoints;
  for (const int step : steps) {
    const std::filesystem::path of_step = folder.path() / std::to_string(step);
    std::filesystem::create_directory(of_step);
    // Whatever the ranks that wrote it.
    save_step(of_step, step, 1 + step % 2, Layout::kFlatRanges);
    checkpoints.push_back(*find_newest_checkpoint(of_step, /*set_aside=*/false));
  }
  return checkpoints;
}

TEST(Average, IsTheMeanInFp64RoundedOnce) {
  const TestFolder folder;
  const std::vector<int> steps = {3, 4, 8};
  const std::vector<CheckpointFolder> checkpoints = saved(folder, steps);
  const CheckpointFolder mean =
      open_checkpoint(average_checkpoints(checkpoints, folder.path() / "mean"));
  EXPECT_EQ(verify_checkpoint(mean), "");
  EXPECT_EQ(mean.manifest.step(), 8);
  EXPECT_FALSE(mean.manifest.has_held_out_loss());

  std::vector<TensorPart> found = model_parts(make_parts(0, 1, Layout::kReplicated));
  load_checkpoint(mean, found);  // and no other tensors
  std::vector<at::Tensor> sums;
  for (const int step : steps) {
    std::vector<TensorPart> parts = model_parts(make_parts(0, 1, Layout::kReplicated));
    fill_parts(parts, step);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const at::Tensor values = parts[i].data.to(at::kDouble);
      if (step == steps.front()) {
        sums.push_back(values);
      } else {
        sums[i] = sums[i] + values;
      }
    }
  }
  ASSERT_FALSE(found.empty());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!found[i].data.is_floating_point()) continue;
    EXPECT_TRUE(at::equal(found[i].data, (sums[i] / 3.0).to(found[i].data.scalar_type())))
        << found[i].name;
  }
}

TEST(Average, OfModelsWithOtherTensorsIsRefused) {
  const TestFolder folder;
  std::vector<CheckpointFolder> checkpoints = saved(folder, {1, 2});
  auto& tensors = *checkpoints[1].manifest.mutable_tensor();
  const auto parameter = std::find_if(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.kind() == "parameter" && tensor.global_shape_size() > 0;
  });
  const std::string name = parameter->name();
  const auto refusal = [&] {
    try {
      average_checkpoints(checkpoints, folder.path() / "mean");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  parameter->set_global_shape(0, parameter->global_shape(0) + 1);
  EXPECT_NE(refusal().find(name), std::string::npos) << refusal();
  for (auto& tensor : tensors) {
    if (tensor.name() == name) tensor.set_name("other");
  }
  EXPECT_NE(refusal().find("missing"), std::string::npos) << refusal();
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "mean"));
}

}  // namespace
}  // namespace birkhoff
