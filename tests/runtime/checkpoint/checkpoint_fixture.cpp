#include "tests/runtime/checkpoint/checkpoint_fixture.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "tests/cluster/base/thread_group.h"

namespace birkhoff {
namespace {

struct TensorSpec {
  const char* name;
  StateKind kind;
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
};

const std::vector<TensorSpec>& specs() {
  static const std::vector<TensorSpec> kSpecs = {
      {"embedding.weight", StateKind::kParameter, at::kFloat, {7, 6}},
      {"blocks.0.norm.weight", StateKind::kParameter, at::kFloat, {5}},
      {"blocks.0.scale", StateKind::kParameter, at::kDouble, {}},
      {"blocks.0.half", StateKind::kParameter, at::kBFloat16, {4, 3}},
      {"blocks.0.none", StateKind::kParameter, at::kFloat, {0, 3}},
      {"adamw.m/embedding.weight", StateKind::kOptimizer, at::kFloat, {7, 6}},
      {"adamw.v/embedding.weight", StateKind::kOptimizer, at::kFloat, {7, 6}},
      {"adamw.m/blocks.0.norm.weight", StateKind::kOptimizer, at::kFloat, {5}},
      {"centroids.count", StateKind::kStatistic, at::kLong, {3}},
  };
  return kSpecs;
}

TensorPart make_part(const TensorSpec& spec, std::vector<std::int64_t> box_offset,
                     std::vector<std::int64_t> box_size, std::int64_t begin, std::int64_t end,
                     int owner) {
  TensorPart part;
  part.name = spec.name;
  part.kind = spec.kind;
  part.region.global_shape = spec.shape;
  part.region.box_offset = std::move(box_offset);
  part.region.box_size = std::move(box_size);
  part.region.flat_begin = begin;
  part.region.flat_end = end;
  part.owner = owner;
  part.data = at::zeros({end - begin}, spec.dtype);
  return part;
}

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  std::int64_t result = 1;
  for (const std::int64_t size : sizes) {
    result *= size;
  }
  return result;
}

// Column box of `rank`. Two ranks share a box: the even one has its first half as a flat range, the
// odd one has the rest.
TensorPart column_part(const TensorSpec& spec, int rank, int num_ranks) {
  const std::int64_t num_boxes = (num_ranks + 1) / 2, box = rank / 2, columns = spec.shape[1];
  const std::int64_t begin = columns * box / num_boxes, end = columns * (box + 1) / num_boxes;
  const std::int64_t elements = spec.shape[0] * (end - begin);
  const bool shared = rank % 2 == 1 || rank + 1 < num_ranks;
  const std::int64_t half = elements / 2;
  return make_part(spec, {0, begin}, {spec.shape[0], end - begin}, rank % 2 == 1 ? half : 0,
                   shared && rank % 2 == 0 ? half : elements, rank);
}

// Global row-major position of each element of the part's data.
std::vector<std::int64_t> global_positions(const TensorPart& part) {
  std::vector<std::int64_t> positions;
  for (std::int64_t flat = part.region.flat_begin; flat < part.region.flat_end; ++flat) {
    std::int64_t rest = flat, position = 0, stride = 1;
    for (std::size_t d = part.region.global_shape.size(); d-- > 0;) {
      position += (part.region.box_offset[d] + rest % part.region.box_size[d]) * stride;
      rest /= part.region.box_size[d];
      stride *= part.region.global_shape[d];
    }
    positions.push_back(position);
  }
  return positions;
}

// Data for fill_parts(). Small integers differ too little, so hashes fill all bits of an element
// except the exponent's highest: saved values are finite.
at::Tensor expected_data(const TensorPart& part, std::int64_t step) {
  at::Tensor data = at::zeros({part.data.numel()}, part.data.scalar_type());
  auto* bytes = static_cast<char*>(data.data_ptr());
  const auto size = static_cast<std::size_t>(data.element_size());
  const std::uint64_t seed = std::hash<std::string>()(part.name) + static_cast<std::uint64_t>(step);
  for (const std::int64_t position : global_positions(part)) {
    std::uint64_t bits = (seed + static_cast<std::uint64_t>(position)) * 0x9e3779b97f4a7c15u;
    bits ^= bits >> 29;
    if (data.is_floating_point()) bits &= ~(std::uint64_t{1} << (8 * size - 2));
    std::memcpy(bytes, &bits, size);
    bytes += size;
  }
  return data;
}

}  // namespace

std::vector<TensorPart> make_parts(int rank, int num_ranks, Layout layout) {
  std::vector<TensorPart> parts;
  for (const TensorSpec& spec : specs()) {
    const std::vector<std::int64_t> zeros(spec.shape.size(), 0);
    const std::int64_t elements = product(spec.shape);
    if (layout == Layout::kFlatRanges && spec.kind != StateKind::kParameter) {
      parts.push_back(make_part(spec, zeros, spec.shape, elements * rank / num_ranks,
                                elements * (rank + 1) / num_ranks, rank));
    } else if (layout == Layout::kColumns && spec.shape.size() == 2 && elements > 0) {
      parts.push_back(column_part(spec, rank, num_ranks));
    } else {
      parts.push_back(make_part(spec, zeros, spec.shape, 0, elements, 0));
    }
  }
  if (layout == Layout::kReplicated) {
    balance_owners(parts, num_ranks);
  }
  return parts;
}

void fill_parts(std::vector<TensorPart>& parts, std::int64_t step) {
  for (TensorPart& part : parts) {
    part.data.copy_(expected_data(part, step));
  }
}

std::vector<std::string> differing_tensors(const std::vector<TensorPart>& parts,
                                           std::int64_t step) {
  std::set<std::string> names;
  for (const TensorPart& part : parts) {
    const at::Tensor expected = expected_data(part, step);
    if (part.data.nbytes() > 0 &&
        std::memcmp(part.data.data_ptr(), expected.data_ptr(), expected.nbytes()) != 0) {
      names.insert(part.name);
    }
  }
  return {names.begin(), names.end()};
}

CheckpointHeader make_header(std::int64_t step) {
  CheckpointHeader header;
  header.set_program("test");
  header.set_run("0123456789abcdef0123456789abcdef");
  header.set_step(step);
  header.set_consumed(step * 8);
  header.set_tokens(step * 64);
  header.set_metrics_bytes(step * 10);
  return header;
}

void save_step(const std::filesystem::path& folder, std::int64_t step, int num_ranks, Layout layout,
               int keep) {
  run_ranks(num_ranks, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, keep, {}, world);
    std::vector<TensorPart> parts = make_parts(world.rank(), num_ranks, layout);
    fill_parts(parts, step);
    writer.save(make_header(step), parts);
    fill_parts(parts, step + 1);  // training continues while the thread writes
    const auto committed = writer.finish();
    if (!committed ||
        committed->filename() !=
            std::filesystem::path("step-" + std::string(8 - std::to_string(step).size(), '0') +
                                  std::to_string(step))) {
      throw std::runtime_error("step was not committed");
    }
  });
}

void expect_holds_step(const CheckpointFolder& checkpoint, std::int64_t step, int num_ranks,
                       Layout layout) {
  EXPECT_EQ(checkpoint.manifest.step(), step);
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<TensorPart> parts = make_parts(rank, num_ranks, layout);
    load_checkpoint(checkpoint, parts);
    EXPECT_EQ(differing_tensors(parts, step), std::vector<std::string>());
  }
}

std::string read_bytes(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::stringstream text;
  text << stream.rdbuf();
  return text.str();
}

void write_bytes(const std::filesystem::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace birkhoff
