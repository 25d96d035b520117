// Groups of ranks of which only one exists. The others are imitated: they always have its values.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/mesh.h"
#include "launcher/measure/step_schedule.h"

namespace birkhoff {

class ImitatedGroup final : public ProcessGroup {
 public:
  // recorder: told of each operation; null: none is. It must outlive the group.
  ImitatedGroup(GroupKind kind, NodeRanks ranks, at::Device device,
                StepRecorder* recorder = nullptr);
  int rank() const override { return ranks_.rank; }
  int size() const override { return ranks_.size; }
  at::Device device() const override { return device_; }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override;
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override;
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, Counts receive_counts, at::Tensor input,
                                      Counts send_counts) override;
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override;
  std::unique_ptr<Work> do_barrier() override { return done_work(); }

 private:
  // Records the operation that is being started; imitate() has its effect on this rank's tensors.
  template <typename Imitate>
  std::unique_ptr<Work> record(Collective what, const at::Tensor& longer, const Imitate& imitate);

  const GroupKind kind_;
  const NodeRanks ranks_;
  const at::Device device_;
  StepRecorder* const recorder_;
};

// The groups of rank 0 of a mesh.
class ImitatedMesh {
 public:
  ImitatedMesh(const MeshShape& shape, at::Device device, StepRecorder* recorder = nullptr);
  ProcessGroup& world() { return world_; }
  ProcessGroup& data() { return data_; }
  ProcessGroup& tensor() { return tensor_; }
  // As Mesh::nodes().
  std::optional<NodeGroups> nodes();

 private:
  ImitatedGroup world_, data_, tensor_, inside_, across_;
};

}  // namespace birkhoff
