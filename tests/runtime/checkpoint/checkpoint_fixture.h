// Shared by the checkpoint tests: a folder that is removed at the end, and a small state that can
// be cut up among ranks in several ways and filled with values that depend only on name, element
// and step.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

class TestFolder {
 public:
  TestFolder() {
    // In memory if the system has that: these tests sync files thousands of times.
    const std::filesystem::path memory = "/dev/shm";
    const bool in_memory = ::access(memory.c_str(), W_OK) == 0;
    std::string name =
        (in_memory ? memory : std::filesystem::temp_directory_path()) / "birkhoff-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  operator const std::filesystem::path&() const { return path_; }

 private:
  std::filesystem::path path_;
};

// How a state is spread over ranks.
enum class Layout {
  kReplicated,  // every rank holds everything whole, owners balanced
  kFlatRanges,  // parameters whole, other tensors cut into flat ranges (an optimizer's slices of a
                // bucket)
  kColumns,  // 2-D tensors cut into column boxes; two ranks share a box in flat ranges where they
             // can
};
inline constexpr Layout kLayouts[] = {Layout::kReplicated, Layout::kFlatRanges, Layout::kColumns};

// The parts of one rank, with their own data, all elements zero.
std::vector<TensorPart> make_parts(int rank, int num_ranks, Layout layout);
// Gives each element of the parts the value for its (name, global position, step).
void fill_parts(std::vector<TensorPart>& parts, std::int64_t step);
// The names of tensors in which some bit differs from fill_parts().
std::vector<std::string> differing_tensors(const std::vector<TensorPart>& parts, std::int64_t step);

// Header of a checkpoint of `step`.
CheckpointHeader make_header(std::int64_t step);
// Saves `step` with `num_ranks` ranks as threads, and waits until it is committed.
void save_step(const std::filesystem::path& folder, std::int64_t step, int num_ranks = 1,
               Layout layout = Layout::kReplicated, int keep = 2);
// Loads with each of `num_ranks` ranks and expects the values of `step` in every bit.
void expect_holds_step(const CheckpointFolder& checkpoint, std::int64_t step, int num_ranks = 1,
                       Layout layout = Layout::kReplicated);

std::string read_bytes(const std::filesystem::path& file);
void write_bytes(const std::filesystem::path& file, const std::string& bytes);
// Names in a folder, sorted, of all entries including hidden ones.
std::vector<std::string> names_in(const std::filesystem::path& folder);

}  // namespace birkhoff
