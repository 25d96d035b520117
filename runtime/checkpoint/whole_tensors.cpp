#include "runtime/checkpoint/whole_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/checkpoint_manifest.pb.h"
#include "runtime/checkpoint/layout.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"

namespace birkhoff {
namespace {

// Of the elements that one exchange brings to their writers, over all ranks.
constexpr std::int64_t kElementsAtOnce = std::int64_t{1} << 21;

TensorRegion window_of(const std::vector<std::int64_t>& shape, Interval elements) {
  return {shape, std::vector<std::int64_t>(shape.size(), 0), shape, elements.begin, elements.end};
}

std::int64_t common_elements(const TensorRegion& a, const TensorRegion& b) {
  std::int64_t elements = 0;
  for_each_common_run(a, b, [&](const CommonRun& run) { elements += run.length; });
  return elements;
}

}  // namespace

bool is_cut(const TensorPart& part) { return is_of_model(part.kind) && !part.region.is_whole(); }

WholeTensors::WholeTensors(ProcessGroup& world, const std::vector<TensorPart>& parts)
    : world_(world) {
  configs::CheckpointManifest list;
  std::vector<const TensorPart*> listed;
  for (const TensorPart& part : parts) {
    if (!is_cut(part) || part.owner != world.rank() || !is_written(part)) continue;
    *list.add_tensor() = manifest_entry(part);
    listed.push_back(&part);
  }
  std::map<std::string, Tensor> by_name;
  const std::vector<std::string> lists =
      world.all_gather_bytes(list.SerializeAsString(), "cut tensors of the model");
  for (int rank = 0; rank < world.size(); ++rank) {
    configs::CheckpointManifest of_rank;
    require(of_rank.ParseFromString(lists[static_cast<std::size_t>(rank)]), "a list of tensors");
    for (int i = 0; i < of_rank.tensor_size(); ++i) {
      const auto& entry = of_rank.tensor(i);
      Tensor& tensor = by_name[entry.name()];
      tensor.name = entry.name();
      tensor.kind = kind_of(entry.kind());
      tensor.dtype = safetensors_scalar_type(entry.dtype());
      tensor.shape.assign(entry.global_shape().begin(), entry.global_shape().end());
      tensor.pieces.push_back(
          {rank, region_of(entry),
           rank == world.rank() ? listed[static_cast<std::size_t>(i)] : nullptr});
    }
  }
  std::vector<std::int64_t> bytes;
  for (auto& [name, tensor] : by_name) {
    bytes.push_back(c10::multiply_integers(tensor.shape) *
                    static_cast<std::int64_t>(c10::elementSize(tensor.dtype)));
    tensors_.push_back(std::move(tensor));
  }
  const std::vector<int> writers = balanced_owners(bytes, world.size());
  for (std::size_t i = 0; i < writers.size(); ++i) tensors_[i].writer = writers[i];
}

std::vector<TensorPart> WholeTensors::mine() const {
  std::vector<TensorPart> whole;
  for (const Tensor& tensor : tensors_) {
    if (tensor.writer != world_.rank()) continue;
    whole.push_back(whole_part(
        tensor.name, tensor.kind,
        at::empty(tensor.shape, at::TensorOptions(tensor.dtype).device(at::kMeta)), tensor.writer));
  }
  return whole;
}

void WholeTensors::collect(const std::function<std::byte*(std::size_t)>& memory) const {
  std::map<const Tensor*, std::byte*> filled;
  for (const Tensor& tensor : tensors_) {
    if (tensor.writer == world_.rank()) filled.emplace(&tensor, memory(filled.size()));
  }
  const auto memory_of = [&](const Tensor& tensor) { return filled.at(&tensor); };
  std::set<c10::ScalarType> dtypes;
  for (const Tensor& tensor : tensors_) dtypes.insert(tensor.dtype);
  for (const c10::ScalarType dtype : dtypes) {
    for (const std::vector<Window>& windows : exchanges_of(dtype)) exchange(windows, memory_of);
  }
}

std::vector<std::vector<WholeTensors::Window>> WholeTensors::exchanges_of(
    c10::ScalarType dtype) const {
  // Each writer gets a share of each exchange, so that all receive at the same time.
  const std::int64_t share = std::max<std::int64_t>(kElementsAtOnce / world_.size(), 1);
  std::vector<std::vector<Window>> exchanges;
  struct Place {
    std::size_t exchange = 0;
    std::int64_t room = 0;
  };
  std::vector<Place> of_writer(static_cast<std::size_t>(world_.size()), Place{0, share});
  for (const Tensor& tensor : tensors_) {
    if (tensor.dtype != dtype) continue;
    Place& place = of_writer[static_cast<std::size_t>(tensor.writer)];
    const std::int64_t end = c10::multiply_integers(tensor.shape);
    for (std::int64_t begin = 0; begin < end;) {
      if (place.room == 0) place = {place.exchange + 1, share};
      if (exchanges.size() <= place.exchange) exchanges.resize(place.exchange + 1);
      const std::int64_t size = std::min(end - begin, place.room);
      exchanges[place.exchange].push_back(
          {&tensor, window_of(tensor.shape, {begin, begin + size})});
      begin += size;
      place.room -= size;
    }
  }
  return exchanges;
}

void WholeTensors::exchange(const std::vector<Window>& windows,
                            const std::function<std::byte*(const Tensor&)>& memory) const {
  const auto num_ranks = static_cast<std::size_t>(world_.size());
  std::vector<std::int64_t> send_counts(num_ranks, 0), receive_counts(num_ranks, 0);
  for (const Window& window : windows) {
    const int writer = window.tensor->writer;
    for (const Piece& piece : window.tensor->pieces) {
      if (piece.part == nullptr && writer != world_.rank()) continue;
      const std::int64_t elements = common_elements(window.region, piece.region);
      if (piece.part != nullptr) send_counts[static_cast<std::size_t>(writer)] += elements;
      if (writer == world_.rank()) receive_counts[static_cast<std::size_t>(piece.rank)] += elements;
    }
  }
  const at::TensorOptions options(windows.front().tensor->dtype);
  const auto buffer = [&](const std::vector<std::int64_t>& counts) {
    return at::empty({std::accumulate(counts.begin(), counts.end(), std::int64_t{0})}, options);
  };
  // Where the elements for, or from, each rank begin.
  const auto places = [](const std::vector<std::int64_t>& counts) {
    std::vector<std::int64_t> begins(counts.size(), 0);
    std::partial_sum(counts.begin(), counts.end() - 1, begins.begin() + 1);
    return begins;
  };
  const at::Tensor sent = buffer(send_counts), received = buffer(receive_counts);
  std::vector<std::int64_t> at_rank = places(send_counts);
  for (const Window& window : windows) {
    std::int64_t& at = at_rank[static_cast<std::size_t>(window.tensor->writer)];
    for (const Piece& piece : window.tensor->pieces) {
      if (piece.part == nullptr) continue;
      std::vector<CommonRun> runs;
      for_each_common_run(window.region, piece.region,
                          [&](const CommonRun& run) { runs.push_back(run); });
      if (runs.empty()) continue;
      // They ascend. One copy from a GPU, not one for each row.
      const std::int64_t first = runs.front().begin_b,
                         size = runs.back().begin_b + runs.back().length - first;
      const at::Tensor data = piece.part->data.narrow(0, first, size).cpu();
      for (const CommonRun& run : runs) {
        sent.narrow(0, at, run.length).copy_(data.narrow(0, run.begin_b - first, run.length));
        at += run.length;
      }
    }
  }
  world_.all_to_all(received, receive_counts, sent, send_counts, "whole tensors of a checkpoint");
  at_rank = places(receive_counts);
  const std::size_t element = received.element_size();
  const auto* from = static_cast<const std::byte*>(received.const_data_ptr());
  for (const Window& window : windows) {
    if (window.tensor->writer != world_.rank()) continue;
    std::byte* const to = memory(*window.tensor);
    for (const Piece& piece : window.tensor->pieces) {
      std::int64_t& at = at_rank[static_cast<std::size_t>(piece.rank)];
      for_each_common_run(window.region, piece.region, [&](const CommonRun& run) {
        std::memcpy(to + static_cast<std::size_t>(window.region.flat_begin + run.begin_a) * element,
                    from + static_cast<std::size_t>(at) * element,
                    static_cast<std::size_t>(run.length) * element);
        at += run.length;
      });
    }
  }
}

}  // namespace birkhoff
