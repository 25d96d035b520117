// The type and conversions that cluster/base/gpu/elements.cuh takes from CUDA's header of this
// name.
#pragma once

#include <c10/util/BFloat16.h>

#include "cluster/base/gpu/launch.h"

using __nv_bfloat16 = c10::BFloat16;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
