// The blocks of keys that queries see. Compiled by g++ and nvcc: no LibTorch here.
#pragma once

namespace birkhoff {

// The blocks of keys that the queries of block n see: n + first_offset .. n + last_offset, where
// they exist.
struct KeyWindow {
  int first_offset = 0, last_offset = 0;
  bool causal = false;  // in their own block (offset 0), queries see keys up to their own

  int num_offsets() const { return last_offset - first_offset + 1; }
  bool is_own_block() const { return first_offset == 0 && last_offset == 0; }
};

}  // namespace birkhoff
