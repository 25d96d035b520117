// One AdamW update of one parameter (Loshchilov & Hutter 2019, algorithm 2), shared by the CPU loop
// and the GPU kernel. Compiled by g++ and nvcc: no LibTorch here.
#pragma once

#include <cmath>

#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// Factors that all parameters share, in the parameters' precision.
template <typename T>
struct AdamWFactors {
  T gradient_scale, beta1, beta2, step_size, inverse_sqrt_correction2, epsilon;
};

// s: gradient_scale; t: the update's number, from 1. Powers are computed in fp64.
template <typename T>
BIRKHOFF_HOST_DEVICE inline AdamWFactors<T> adamw_factors(double gradient_scale, double beta1,
                                                          double beta2, double epsilon,
                                                          double learning_rate, double t) {
  return {static_cast<T>(gradient_scale),
          static_cast<T>(beta1),
          static_cast<T>(beta2),
          static_cast<T>(learning_rate / (1 - std::pow(beta1, t))),
          static_cast<T>(1 / std::sqrt(1 - std::pow(beta2, t))),
          static_cast<T>(epsilon)};
}

//   g' = s g,   m <- b1 m + (1 - b1) g',   v <- b2 v + (1 - b2) g'^2
//   p <- keep p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + epsilon)
//
// keep: 1 - lr wd where weight decay applies to the parameter, else 1.
template <typename T>
BIRKHOFF_HOST_DEVICE inline void adamw_update(T& p, T g, T& m, T& v, T keep,
                                              const AdamWFactors<T>& f) {
  const T gradient = g * f.gradient_scale;
  const T m_new = f.beta1 * m + (1 - f.beta1) * gradient;
  const T v_new = f.beta2 * v + (1 - f.beta2) * gradient * gradient;
  const T denominator = std::sqrt(v_new) * f.inverse_sqrt_correction2 + f.epsilon;
  p = keep * p - f.step_size * m_new / denominator;
  m = m_new;
  v = v_new;
}

}  // namespace birkhoff
