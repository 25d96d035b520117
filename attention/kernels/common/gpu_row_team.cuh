// Teams of threads that own a row each, for kernels that pass over rows. A lane of a team has runs
// of kTeamColumns neighboring columns, kRowTeam such runs apart, so that a warp moves several
// whole rows at a time, 16 bytes per lane where rows are aligned.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {

constexpr int kRowTeam = 8, kTeamColumns = 8;
constexpr int kTeamThreads = 256, kRowsOfBlock = kTeamThreads / kRowTeam;  // of a block

// The row that the thread's team owns, of `all` rows: at least one and fewer than 2^31. Teams after
// the last row get the last row, and must not write.
struct TeamNumber {
  bool exists;
  int number, member;  // of the row; of the thread in its team

  __device__ explicit TeamNumber(unsigned all) {
    const unsigned team = blockIdx.x * kRowsOfBlock + threadIdx.x / kRowTeam;
    exists = team < all;
    number = static_cast<int>(exists ? team : all - 1);
    member = static_cast<int>(threadIdx.x) % kRowTeam;
  }
};

// Calls use(first) for the first column of each run of the lane `member`.
template <typename Use>
__device__ inline void visit_runs(int member, int head_dim, Use use) {
  for (int first = member * kTeamColumns; first < head_dim; first += kRowTeam * kTeamColumns) {
    use(first);
  }
}

// Whether a run lies in the row and may be moved 16 bytes at a time.
__device__ inline bool is_whole(const void* run, int first, int head_dim) {
  return first + kTeamColumns <= head_dim && reinterpret_cast<std::uintptr_t>(run) % 16 == 0;
}

// The run of a row that begins at column `first`; zeros after the row's end.
template <typename T>
__device__ inline void load_run(const T* row, int first, int head_dim, float (&x)[kTeamColumns]) {
  constexpr int kCount = 16 / sizeof(T);
  if (is_whole(row + first, first, head_dim)) {
#pragma unroll
    for (int c = 0; c < kTeamColumns; c += kCount) {
      const auto part = load_vector<T, kCount>(row + first + c);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[c + i] = to_float(part.elements[i]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) {
      x[c] = first + c < head_dim ? to_float(row[first + c]) : 0.0f;
    }
  }
}
// Rounds to T.
template <typename T>
__device__ inline void store_run(T* row, int first, int head_dim, const float (&x)[kTeamColumns]) {
  constexpr int kCount = 16 / sizeof(T);
  if (is_whole(row + first, first, head_dim)) {
#pragma unroll
    for (int c = 0; c < kTeamColumns; c += kCount) {
      Vector<T, kCount> part;
#pragma unroll
      for (int i = 0; i < kCount; ++i) part.elements[i] = from_float<T>(x[c + i]);
      store_vector(row + first + c, part);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kTeamColumns; ++c) {
      if (first + c < head_dim) row[first + c] = from_float<T>(x[c]);
    }
  }
}

}  // namespace birkhoff
