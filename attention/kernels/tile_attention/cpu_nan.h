// The two passes over one tile of queries, exact about NaN. The results follow the formulas of
// cpu_loop.h over the keys that a query sees: NaN where these hold NaN, elsewhere the same bits as
// without NaN. A query also sees keys that dropout drops. Costs nothing if there is no NaN.
#pragma once

#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {

// For T = float, double and Bf16. Arguments as in TileKernels.
template <typename T>
void attend_tile(const TileKernels<T>& kernels, const TileShape& shape, const QueryTile<T>& queries,
                 const KeyTile<T>* keys, int num_key_tiles, void* scratch);
template <typename T>
void add_tile_gradients(const TileKernels<T>& kernels, const TileShape& shape,
                        const QueryTile<T>& queries, const KeyTile<T>* keys, int num_key_tiles,
                        void* scratch);

}  // namespace birkhoff
