// Training on meshes of data-parallel and tensor-parallel ranks, which are threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "configs/loader/config_io.h"
#include "data/batch/partition.h"
#include "runtime/run_checkpoints.h"
#include "runtime/tasks/task.h"
#include "runtime/training_step.h"
#include "tests/cluster/base/thread_group.h"

namespace birkhoff {

struct Axes {
  int data, tensor;
};

// Two layers of Sinkhorn attention and routing, with noise, in fp64.
configs::Config mesh_config(const std::vector<std::string>& settings = {});

// Rows of an endless batch, of which global_batch are a step's.
Batch mesh_batch(const configs::Config& config, Interval rows);

struct MeshTraining {
  MeshTraining(configs::Config of_run, const MeshRank& of_mesh);
  ProcessGroup* pass_group() {
    return buckets.passes_are_collective() ? &rank.world : &rank.tensor;
  }

  // This rank's rows of step `number`'s batch.
  Batch batch(std::int64_t number) const;
  GradientSums run(std::int64_t number, const StepHooks& hooks = {});
  std::vector<TensorPart> parts() {
    return training_parts(*model, buckets, *optimizer, rank.world.size());
  }

  const configs::Config config;
  const MeshRank rank;
  const std::unique_ptr<Model> model;
  GradBuckets buckets;
  const std::unique_ptr<Optimizer> optimizer;
  TrainingStep step;
};

// Takes three steps, the first of which is clipped, and compares the sums of gradients, the
// figures and the parameters with those of one rank.
void expect_steps_of_one_rank(const std::vector<Axes>& meshes,
                              const std::vector<std::string>& settings);

}  // namespace birkhoff
