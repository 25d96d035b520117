// Tensors of a model that are cut over ranks (tensor parallelism, ZeRO stage 3), put together for a
// checkpoint: other programs read whole tensors, whatever the mesh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

// Whether the part is an incomplete tensor of a model. Its owner sends it to the tensor's writer.
bool is_cut(const TensorPart& part);

class WholeTensors {
 public:
  // parts: this rank's. Each tensor that is_cut() gets a rank that writes it; all ranks get about
  // as many bytes. `parts` and `world`, a group on hosts, must outlive this object. Collective over
  // the world, as is collect().
  WholeTensors(ProcessGroup& world, const std::vector<TensorPart>& parts);

  // The tensors that this rank writes, as whole parts whose data is on the meta device.
  std::vector<TensorPart> mine() const;
  // Sends the parts of all tensors to their writers, a few MiB at a time. memory(i): the bytes that
  // the i-th of mine() fills, row-major. Waits for a GPU.
  void collect(const std::function<std::byte*(std::size_t)>& memory) const;

 private:
  struct Piece {
    int rank;
    TensorRegion region;
    const TensorPart* part;  // null: another rank's
  };
  struct Tensor {
    std::string name;
    StateKind kind;
    c10::ScalarType dtype;
    std::vector<std::int64_t> shape;
    std::vector<Piece> pieces;
    int writer = 0;
  };
  // Elements of a tensor, counted row-major.
  struct Window {
    const Tensor* tensor;
    TensorRegion region;
  };
  // What to exchange at a time, of the tensors of one dtype.
  std::vector<std::vector<Window>> exchanges_of(c10::ScalarType dtype) const;
  void exchange(const std::vector<Window>& windows,
                const std::function<std::byte*(const Tensor&)>& memory) const;

  ProcessGroup& world_;
  std::vector<Tensor> tensors_;
};

}  // namespace birkhoff
