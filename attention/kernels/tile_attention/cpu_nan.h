// The two passes over one tile of queries, exact about NaN: results are what the formulas of
// cpu_loop.h give over the keys that a query sees, NaN where these hold NaN, and the same
// bits as without it elsewhere. Dropped keys count as seen. Costs nothing where there is no NaN.
#pragma once

#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {

// For T = float, double and Bf16; arguments as of TileKernels.
template <typename T>
void attend_tile(const TileKernels<T>& kernels, const TileShape& shape, const QueryTile<T>& queries,
                 const KeyTile<T>* keys, int num_key_tiles, void* scratch);
template <typename T>
void add_tile_gradients(const TileKernels<T>& kernels, const TileShape& shape,
                        const QueryTile<T>& queries, const KeyTile<T>* keys, int num_key_tiles,
                        void* scratch);

}  // namespace birkhoff
