// The type and conversions that cluster/base/gpu/elements.cuh takes from CUDA's header of this
// name.
#pragma once

#include <c10/util/Half.h>

#include "cluster/base/gpu/launch.h"

using __half = c10::Half;

inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return x; }
